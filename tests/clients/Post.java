import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/**
 * Posts with HttpClient: Post URL CALL..., where a call is a method (KEY: POST with an Idempotency-Key) and a body.
 * Prints a line for each: the status, or what has failed.
 */
public final class Post {
    private Post() {}

    public static void main(String[] words) throws InterruptedException {
        var client = HttpClient.newHttpClient();
        for (int at = 1; at < words.length; at++) {
            String[] call = words[at].split(" ", 2);
            var body = HttpRequest.BodyPublishers.ofString(call.length > 1 ? call[1] : "");
            var request = HttpRequest.newBuilder(URI.create(words[0])).header("Content-Type", "application/json");
            switch (call[0]) {
                case "GET" -> request.GET();
                case "KEY" -> request.POST(body).header("Idempotency-Key", "7");
                default -> request.method(call[0], body);
            }
            try {
                System.out.println(client.send(request.build(), HttpResponse.BodyHandlers.ofString()).statusCode());
            } catch (IOException error) {
                var text = new StringBuilder();
                for (Throwable cause = error; cause != null; cause = cause.getCause()) {
                    text.append(cause).append(' ');
                }
                System.out.println(text.toString().replace('\n', ' '));
            }
        }
    }
}
