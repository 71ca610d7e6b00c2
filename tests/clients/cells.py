"""Many calls at once, without any timeout of their own: on blocking sockets (a thread each), or by
asyncio. Input and output as in cells.c."""
import asyncio
import socket
import sys
import threading
import time

HEAD, REST = b"GET / HTTP/1.1\r\n", b"Host: cells\r\n\r\n"
CHUNK = bytes(65536)


def blocking(kind, value_ms, host, port):
    begin = time.monotonic()
    error = 0
    try:
        connection = socket.create_connection((host, port))
        with connection:
            if kind == "write":
                begin = time.monotonic()
                while True:
                    # A part of it: the rest was waited for in vain.
                    if connection.send(CHUNK) == len(CHUNK):
                        begin = time.monotonic()
            connection.sendall(HEAD)
            if kind == "deadline":
                time.sleep(value_ms * 0.3 / 1000)
            connection.sendall(REST)
            if kind == "read":
                begin = time.monotonic()
            connection.recv(1)
    except OSError as failure:
        error = failure.errno
    return error, time.monotonic() - begin


async def streaming(kind, value_ms, host, port):
    begin = time.monotonic()
    error = 0
    try:
        reader, writer = await asyncio.open_connection(host, port)
        if kind == "write":
            begin = time.monotonic()
            while True:
                writer.write(CHUNK)
                await writer.drain()
                begin = time.monotonic()
        writer.write(HEAD)
        if kind == "deadline":
            await asyncio.sleep(value_ms * 0.3 / 1000)
        writer.write(REST)
        if kind == "read":
            begin = time.monotonic()
        await reader.read(1)
    except OSError as failure:
        # Where asyncio makes a text of it, the number is in the text alone.
        error = failure.errno
    return error, time.monotonic() - begin


def by_threads(cells):
    results = [None] * len(cells)

    def call(index, cell):
        results[index] = blocking(*cell)

    threads = [threading.Thread(target=call, args=pair) for pair in enumerate(cells)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


async def by_tasks(cells):
    return await asyncio.gather(*(streaming(*cell) for cell in cells))


print("ready", flush=True)
lines = [line.split() for line in sys.stdin]
cells = [(kind, int(value), host, int(port)) for kind, value, host, port in lines]
results = by_threads(cells) if sys.argv[1] == "blocking" else asyncio.run(by_tasks(cells))
for index, (error, elapsed) in enumerate(results):
    print(index, error, round(elapsed * 1e6))
