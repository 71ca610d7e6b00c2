import java.io.IOException;
import java.net.HttpURLConnection;
import java.net.URI;

/** Asks N times one after the other, each with up to R retries at once: Retrying HOST PORT N R PAUSE_MS. */
public final class Retrying {
    private Retrying() {}

    private static boolean asks(String url) {
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

    public static void main(String[] words) throws InterruptedException {
        // (It would ask once more by itself.)
        System.setProperty("sun.net.http.retryPost", "false");
        String url = "http://" + words[0] + ":" + words[1] + "/";
        for (int operation = 0; operation < Integer.parseInt(words[2]); operation++) {
            for (int attempt = 0; attempt <= Integer.parseInt(words[3]); attempt++) {
                if (asks(url)) {
                    break;
                }
            }
            Thread.sleep(Long.parseLong(words[4]));
        }
    }
}
