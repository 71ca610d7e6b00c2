import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** Asks for / with the HTTP client of the standard library, once. */
public class Ask {
    public static void main(String[] args) throws Exception {
        URI uri = URI.create("http://" + args[0] + ":" + args[1] + "/");
        HttpRequest request = HttpRequest.newBuilder(uri).version(HttpClient.Version.HTTP_1_1).build();
        try {
            HttpResponse<String> response =
                HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(response.statusCode() + " " + response.body().strip());
        } catch (java.io.IOException error) {
            for (Throwable cause = error; cause != null; cause = cause.getCause()) {
                System.err.println(cause);
            }
            System.exit(7);
        }
    }
}
