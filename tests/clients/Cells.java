import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.nio.ByteBuffer;
import java.nio.channels.SelectionKey;
import java.nio.channels.Selector;
import java.nio.channels.SocketChannel;
import java.util.ArrayList;
import java.util.List;

/**
 * Many calls at once, without any timeout of their own: on blocking sockets (a thread each), or on
 * channels of one selector ("nio"); by sockets of IPv4 ("4"), or of IPv6 that reach IPv4, too. Input
 * and output as in cells.c, with the exception's text for a number.
 */
public class Cells {
    static final byte[] HEAD = "GET / HTTP/1.1\r\n".getBytes();
    static final byte[] REST = "Host: cells\r\n\r\n".getBytes();
    static final byte[] CHUNK = new byte[65536];

    static synchronized void tell(int index, String said, long begin) {
        String word = said == null ? "0" : said.replace(' ', '_');
        System.out.println(index + " " + word + " " + (System.nanoTime() - begin) / 1000);
    }

    static InetSocketAddress address(String[] cell) throws IOException {
        return new InetSocketAddress(InetAddress.getByName(cell[2]), Integer.parseInt(cell[3]));
    }

    static void blocking(int index, String[] cell) {
        long begin = System.nanoTime();
        String said = null;
        try (Socket socket = new Socket()) {
            socket.connect(address(cell));
            var out = socket.getOutputStream();
            if (cell[0].equals("write")) {
                begin = System.nanoTime();
                while (true) {
                    out.write(CHUNK);
                    begin = System.nanoTime();
                }
            }
            out.write(HEAD);
            if (cell[0].equals("deadline")) {
                Thread.sleep(Long.parseLong(cell[1]) * 3 / 10);
            }
            out.write(REST);
            if (cell[0].equals("read")) {
                begin = System.nanoTime();
            }
            socket.getInputStream().read();
        } catch (IOException | InterruptedException error) {
            said = error.getMessage();
        }
        tell(index, said, begin);
    }

    /** What a key carries: { index, begin, when the second part is due or 0 }. */
    static void selecting(List<String[]> cells) throws IOException {
        Selector selector = Selector.open();
        for (int index = 0; index < cells.size(); index++) {
            SocketChannel channel = SocketChannel.open();
            channel.configureBlocking(false);
            long[] state = {index, System.nanoTime(), 0};
            channel.register(selector, SelectionKey.OP_CONNECT, state);
            channel.connect(address(cells.get(index)));
        }
        int left = cells.size();
        while (left > 0) {
            selector.select(5);
            for (SelectionKey key : selector.keys()) {
                if (!key.isValid()) {
                    continue;
                }
                long[] state = (long[]) key.attachment();
                try {
                    if (state[2] != 0 && System.nanoTime() >= state[2]) {
                        ((SocketChannel) key.channel()).write(ByteBuffer.wrap(REST));
                        state[2] = 0;
                    }
                    if (selector.selectedKeys().contains(key)) {
                        step(key, state, cells.get((int) state[0]));
                    }
                } catch (IOException error) {
                    tell((int) state[0], error.getMessage(), state[1]);
                    key.channel().close();
                    left--;
                }
            }
            selector.selectedKeys().clear();
        }
    }

    static void step(SelectionKey key, long[] state, String[] cell) throws IOException {
        SocketChannel channel = (SocketChannel) key.channel();
        if (key.isConnectable() && channel.finishConnect()) {
            key.interestOps(SelectionKey.OP_READ);
            if (cell[0].equals("write")) {
                key.interestOps(SelectionKey.OP_WRITE);
                state[1] = System.nanoTime();
                return;
            }
            channel.write(ByteBuffer.wrap(HEAD));
            if (cell[0].equals("deadline")) {
                state[2] = System.nanoTime() + Long.parseLong(cell[1]) * 300_000;
            } else {
                channel.write(ByteBuffer.wrap(REST));
                state[1] = cell[0].equals("read") ? System.nanoTime() : state[1];
            }
        } else if (key.isWritable() && channel.write(ByteBuffer.wrap(CHUNK)) > 0) {
            state[1] = System.nanoTime();
        } else if (key.isReadable() && channel.read(ByteBuffer.allocate(9)) < 0) {
            throw new IOException("the end");
        }
    }

    public static void main(String[] args) throws Exception {
        // Before anything of the network is loaded.
        System.setProperty("java.net.preferIPv4Stack", String.valueOf(args[1].equals("4")));
        System.out.println("ready");
        List<String[]> cells = new ArrayList<>();
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            cells.add(line.split(" "));
        }
        if (args[0].equals("nio")) {
            selecting(cells);
            return;
        }
        for (int index = 0; index < cells.size(); index++) {
            int number = index;
            new Thread(() -> blocking(number, cells.get(number))).start();
        }
    }
}
