"""Short exchanges by many threads, each from one port of its own, so that the next connection has both
ends and the descriptor of the one before. Some do not wait for their end.
`churn()` gives how many were answered, aborted and left, and what must not have happened."""
import collections
import random
import socket
import struct
import threading
import time

THREADS = 100
HOST = "10.77.0.2"
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def exchange(port, value, count, wrong):
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        s.bind(("10.77.0.1", port))
        s.connect((HOST, 8080))
        if random.random() < 0.25:
            s.settimeout(value * random.uniform(0.6, 1.4))
        begin = time.monotonic()
        try:
            s.sendall(b"x")
            count["answered" if s.recv(9) else "closed"] += 1
        except TimeoutError:
            count["left"] += 1
        except ConnectionAbortedError:
            count["aborted"] += 1
            # Not its own time, but that of one before it.
            if time.monotonic() - begin < value - 0.002:
                wrong.append(f"aborted after {time.monotonic() - begin} s")


def work(number, tries, value, count, wrong):
    try:
        with socket.create_connection((HOST, 8081)) as bystander:
            for _ in range(tries):
                exchange(20000 + number, value, count, wrong)
                bystander.sendall(b"x")
                assert bystander.recv(9) == b"y"
    except Exception as error:
        wrong.append(repr(error))


def churn(tries, value):
    wrong = []
    counts = [collections.Counter() for _ in range(THREADS)]
    threads = [
        threading.Thread(target=work, args=(number, tries // THREADS, value, counts[number], wrong))
        for number in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = sum(counts, collections.Counter())
    return {**total, "wrong": wrong}
