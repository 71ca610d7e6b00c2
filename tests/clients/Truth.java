import java.io.IOException;
import java.net.HttpURLConnection;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse.BodyHandlers;

/** Programs whose retries are known: Truth HOW HOST PORT SECONDS RATE RETRIES, as truth.py. */
public final class Truth {
    private Truth() {}

    private static boolean connection(String url) {
        try {
            var connection = (HttpURLConnection) URI.create(url).toURL().openConnection();
            connection.setRequestProperty("Connection", "close");
            int status = connection.getResponseCode();
            var body = status < 400 ? connection.getInputStream() : connection.getErrorStream();
            if (body != null) {
                body.readAllBytes();
                body.close();
            }
            return status < 500;
        } catch (IOException error) {
            return false;
        }
    }

    private static boolean client(HttpClient client, String url) throws InterruptedException {
        try {
            var request = HttpRequest.newBuilder(URI.create(url)).build();
            return client.send(request, BodyHandlers.discarding()).statusCode() < 500;
        } catch (IOException error) {
            return false;
        }
    }

    public static void main(String[] words) throws InterruptedException {
        // (They would ask once more by themselves.)
        System.setProperty("sun.net.http.retryPost", "false");
        System.setProperty("jdk.httpclient.enableAllMethodRetry", "false");
        System.setProperty("jdk.httpclient.disableRetryConnect", "true");
        var client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
        boolean isClient = words[0].equals("client");
        double rate = Double.parseDouble(words[4]);
        int most = Integer.parseInt(words[5]);
        long end = System.nanoTime() + (long) (Double.parseDouble(words[3]) * 1e9);
        int calls = 0;
        int retries = 0;
        while (System.nanoTime() < end) {
            calls++;
            String url = "http://" + words[1] + ":" + words[2] + "/java/" + calls;
            for (int attempt = 0; attempt <= most; attempt++) {
                if (attempt > 0) {
                    retries++;
                }
                if (isClient ? client(client, url) : connection(url)) {
                    break;
                }
            }
            Thread.sleep((long) ((0.5 + Math.random()) * 1000 / rate));
        }
        System.out.println("{\"calls\":" + calls + ",\"retries\":" + retries + "}");
    }
}
