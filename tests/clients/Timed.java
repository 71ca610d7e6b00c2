import java.net.HttpURLConnection;
import java.net.URI;

/** Asks for / on one connection: address, port, count. Prints the wait for each answer, us. */
public class Timed {
    public static void main(String[] args) throws Exception {
        URI uri = URI.create("http://" + args[0] + ":" + args[1] + "/");
        for (int left = Integer.parseInt(args[2]); left > 0; left--) {
            HttpURLConnection connection = (HttpURLConnection) uri.toURL().openConnection();
            connection.connect();
            long asked = System.nanoTime();
            connection.getResponseCode();
            System.out.println((System.nanoTime() - asked) / 1000.0);
            connection.getInputStream().readAllBytes();
        }
    }
}
