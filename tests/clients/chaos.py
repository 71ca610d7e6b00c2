"""Exchanges that end in every way a client has: argv is address, port, connections, seed."""

import random
import socket
import struct
import sys
import threading

address, port, connections, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
THREADS = 8


def one(chance):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as s:
        s.settimeout(chance.choice([0.01, 0.05, 5]))
        if chance.random() < 0.2:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.connect((address, port))
        for _ in range(chance.randrange(4)):
            s.sendall(b"GET / HTTP/1.1\r\n\r\n" * chance.choice([1, 1, 3]))
            what = chance.randrange(6)
            if what == 0:
                return
            if what == 1:
                s.shutdown(socket.SHUT_WR)
            if what == 2:
                s.sendall(b"x" * 100_000)
            if not s.recv(chance.choice([1, 100_000])):
                return


def many(number):
    chance = random.Random(f"{seed} {number}")
    for _ in range(connections // THREADS):
        try:
            one(chance)
        except OSError:
            pass


threads = [threading.Thread(target=many, args=[number]) for number in range(THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
