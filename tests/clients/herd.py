"""A herd: python3 herd.py HOST PORT CLIENTS, all of which fail at once and retry once. Told as JSON: for
each retry its source port and when connect() was called (CLOCK_REALTIME, ns)."""

import json
import resource
import socket
import sys
import threading
import time

address = (sys.argv[1], int(sys.argv[2]))
clients = int(sys.argv[3])
# Nobody is interrupted between looking at the clock and connecting.
sys.setswitchinterval(10)
threading.stack_size(128 * 1024)
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
gate = threading.Barrier(clients)
told = []


def client():
    first = socket.socket()
    first.connect_ex(address)
    gate.wait()
    first.close()
    second = socket.socket()
    second.bind(("", 0))
    port = second.getsockname()[1]
    called = time.clock_gettime_ns(time.CLOCK_REALTIME)
    second.connect_ex(address)
    told.append([port, called])
    second.close()


threads = [threading.Thread(target=client) for _ in range(clients)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(told))
