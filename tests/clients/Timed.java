import java.io.InputStream;
import java.io.OutputStream;
import java.net.Socket;
import java.nio.charset.StandardCharsets;

/** Asks for / on one connection: address, port, count. Prints the wait for each answer, us. */
public class Timed {
    public static void main(String[] args) throws Exception {
        byte[] request = "GET / HTTP/1.1\r\nHost: test\r\n\r\n".getBytes(StandardCharsets.US_ASCII);
        byte[] answer = new byte[1000];
        try (Socket socket = new Socket(args[0], Integer.parseInt(args[1]))) {
            OutputStream output = socket.getOutputStream();
            InputStream input = socket.getInputStream();
            for (int left = Integer.parseInt(args[2]); left > 0; left--) {
                output.write(request);
                long asked = System.nanoTime();
                // The answer is short, and written at once.
                if (input.read(answer) <= 0) {
                    throw new java.io.EOFException();
                }
                System.out.println((System.nanoTime() - asked) / 1000.0);
            }
        }
    }
}
