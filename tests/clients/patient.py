"""Calls that take long and rightly so, all at once, each by a function named after its case.
`run()` gives what each of them ended with: "ok", or what went wrong."""
import socket
import threading
import time

HOST = "10.77.0.2"
# As in never_fires.rs.
SLOW, HTTP, PUSH, WEBSOCKET, QUERY, POOL, UPLOAD, PRESSURE = range(8100, 8108)


def connect(port):
    # No call takes half as long, with all of its pauses.
    return socket.create_connection((HOST, port), timeout=60)


def exactly(s, count):
    data = b""
    while len(data) < count:
        piece = s.recv(count - len(data))
        assert piece, f"the end after {len(data)} of {count} bytes"
        data += piece
    return data


def slow_download():
    with connect(SLOW) as s:
        s.sendall(b"x")
        exactly(s, 4)


def slow_http_download():
    with connect(HTTP) as s:
        s.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        assert s.makefile("rb").read().endswith(b"\r\n\r\nyyyy")


def server_push():
    with connect(PUSH) as s:
        exactly(s, 3)


def websocket():
    with connect(WEBSOCKET) as s:
        s.sendall(b"GET / HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        exactly(s, len(b"HTTP/1.1 101 Switching Protocols\r\n\r\n"))
        time.sleep(3)
        # A masked frame, which nobody has to answer.
        s.sendall(b"\x82\x81\x01\x02\x03\x04x")
        exactly(s, 3)


def long_query():
    with connect(QUERY) as s:
        s.sendall(b"Q")
        exactly(s, 1)


def idle_in_a_pool():
    with connect(POOL) as s:
        for pause in (3, 0):
            s.sendall(b"x")
            exactly(s, 1)
            time.sleep(pause)


def slow_upload():
    with connect(UPLOAD) as s:
        for _ in range(8):
            s.sendall(b"x")
            time.sleep(0.7)
        exactly(s, 1)


def back_pressure():
    with connect(PRESSURE) as s:
        s.sendall(bytes(12 << 20))
        exactly(s, 1)


ALL = [slow_download, slow_http_download, server_push, websocket, long_query, idle_in_a_pool,
       slow_upload, back_pressure]


def run():
    said = {}

    def one(case):
        try:
            case()
            said[case.__name__] = "ok"
        except Exception as error:
            said[case.__name__] = repr(error)

    threads = [threading.Thread(target=one, args=(case,)) for case in ALL]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said
