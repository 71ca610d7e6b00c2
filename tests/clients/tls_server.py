"""A TLS server: ADDRESS PORT FILE VERSION TICKETS ANSWERS DELAY_MS.

FILE holds certificate and key. The first ANSWERS connections are answered, each record with one of
300 bytes after the delay; those after them are not, once the handshake is done. `ready` is printed
when it listens.
"""

import socket
import ssl
import sys
import threading
import time

address, port, file, version, tickets, answers, delay_ms = sys.argv[1:]
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(file)
wanted = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}[version]
context.minimum_version = context.maximum_version = wanted
context.num_tickets = int(tickets)


def serve(raw, number):
    try:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = context.wrap_socket(raw, server_side=True)
        while request := stream.recv(65536):
            if request == b"bye":
                # It does not wait for the client's own.
                stream.settimeout(0.1)
                stream.unwrap()
            if number < int(answers):
                time.sleep(int(delay_ms) / 1000)
                stream.sendall(bytes(300))
    except OSError:
        pass
    raw.close()


listener = socket.create_server((address, int(port)), backlog=128)
print("ready", flush=True)
number = 0
while True:
    raw, _ = listener.accept()
    threading.Thread(target=serve, args=(raw, number), daemon=True).start()
    number += 1
