"""Programs whose retries are known: python3 retrying.py URL HOW [ARGUMENT...], told as JSON.

Each makes operations (`calls`). `made` counts the connects of all, `retries` those after the first of an
operation, `failed` the operations that ended badly.
"""

import asyncio
import http.client
import itertools
import json
import queue
import random
import socket
import sys
import threading
import time
import urllib.parse

url = urllib.parse.urlsplit(sys.argv[1])
address = (url.hostname, url.port)
counts = {"made": 0, "calls": 0, "retries": 0, "failed": 0, "refused": 0}
lock = threading.Lock()


def count(**what):
    with lock:
        for key, number in what.items():
            counts[key] += number


def ask(path=url.path or "/"):
    """One attempt; true when it went well."""
    count(made=1, calls=1)
    connection = http.client.HTTPConnection(*address, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        return answer.status < 500
    except ConnectionRefusedError:
        count(refused=1)
        return False
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def operation(retries, wait, path=url.path or "/"):
    for number in range(retries + 1):
        if number > 0:
            count(retries=1, calls=-1)
            if wait:
                time.sleep(wait)
        if ask(path):
            return
    count(failed=1)


def sequence(operations, pause, jitter, retries, wait):
    """One after the other, with pauses: of this length, or (jitter 1) at random times."""
    for _ in range(operations):
        operation(retries, wait)
        time.sleep(random.expovariate(1 / pause) if jitter and pause else pause)


def named(operations, names, pause, retries, wait):
    """One after the other: so many names in turn, each as a path of its own."""
    for number in range(operations):
        operation(retries, wait, f"/named/{number % names}")
        time.sleep(pause)


def threads(workers, each, pause, retries, wait):
    """Workers that pause at random."""
    pool = [
        threading.Thread(target=sequence, args=(each, pause, 1, retries, wait))
        for _ in range(workers)
    ]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()


def kept(workers, each, pause):
    """Workers that keep their connection from call to call, and dial when it has failed."""

    def work():
        connection = http.client.HTTPConnection(*address, timeout=5)
        for _ in range(each):
            count(calls=1, made=connection.sock is None)
            try:
                connection.request("GET", url.path or "/", headers={"Connection": "keep-alive"})
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                connection.close()
            time.sleep(random.expovariate(1 / pause))

    pool = [threading.Thread(target=work) for _ in range(workers)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()


def worker_queue(workers, calm, pause, burst):
    """Workers of one queue: calls come now and then, and then all at once."""
    jobs = queue.SimpleQueue()

    def work():
        while jobs.get():
            ask()

    pool = [threading.Thread(target=work) for _ in range(workers)]
    for thread in pool:
        thread.start()
    for _ in range(calm):
        jobs.put(True)
        time.sleep(random.expovariate(1 / pause))
    for _ in range(burst):
        jobs.put(True)
    for _ in pool:
        jobs.put(False)
    for thread in pool:
        thread.join()


def crawl(workers, seconds, pause):
    """Workers with work of their own, which pause with what they got, and take up the next at once when a
    call fails."""
    end = time.monotonic() + seconds
    items = itertools.count()

    def work():
        while time.monotonic() < end:
            if ask(f"/items/{next(items)}"):
                time.sleep(pause + random.random() * pause)

    pool = [threading.Thread(target=work) for _ in range(workers)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()


def thread_each(operations, pause, retries, wait):
    """A thread for each operation, as servers do it."""
    pool = []
    for _ in range(operations):
        pool.append(threading.Thread(target=operation, args=(retries, wait)))
        pool[-1].start()
        time.sleep(pause)
    for thread in pool:
        thread.join()


async def ask_async():
    count(made=1, calls=1)
    writer = None
    try:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        line = await reader.readline()
        await reader.read()
        return line.split()[1:2] == [b"200"]
    except OSError:
        return False
    finally:
        if writer is not None:
            writer.close()


def event_loop(operations, pause, retries, wait):
    """Operations on one thread, begun at random times whether or not others are under way."""

    async def one():
        for number in range(retries + 1):
            if number > 0:
                count(retries=1, calls=-1)
                await asyncio.sleep(wait)
            if await ask_async():
                return

    async def all_of_them():
        tasks = []
        for _ in range(operations):
            tasks.append(asyncio.create_task(one()))
            await asyncio.sleep(random.expovariate(1 / pause))
        await asyncio.gather(*tasks)

    asyncio.run(all_of_them())


def urllib3_pool(operations, pause, retries, factor):
    """What requests and most of Python do: urllib3's Retry, which knows its own history."""
    import urllib3

    retry = urllib3.Retry(
        total=retries, backoff_factor=factor, status_forcelist=[503], raise_on_status=False
    )
    with urllib3.PoolManager(retries=retry) as pool:
        for _ in range(operations):
            count(made=1)
            try:
                answer = pool.request("GET", sys.argv[1])
                count(made=len(answer.retries.history), retries=len(answer.retries.history))
            except urllib3.exceptions.MaxRetryError:
                count(made=retries, retries=retries, failed=1)
            time.sleep(pause)


def refused_loop(attempts, wait):
    """Connects again and again, as a program that waits for its database."""
    errnos = []
    for _ in range(attempts):
        connection = socket.socket()
        errnos.append(connection.connect_ex(address))
        connection.close()
        time.sleep(wait)
    counts["errnos"] = errnos


def parallel(number):
    """First attempts at once on one thread: none can know of the others' failures."""
    sockets = [socket.socket() for _ in range(number)]
    for connection in sockets:
        connection.setblocking(False)
        connection.connect_ex(address)
    time.sleep(0.1)


how = {
    "sequence": sequence,
    "named": named,
    "threads": threads,
    "thread_each": thread_each,
    "event_loop": event_loop,
    "urllib3": urllib3_pool,
    "refused": refused_loop,
    "parallel": parallel,
    "kept": kept,
    "queue": worker_queue,
    "crawl": crawl,
}[sys.argv[2]]
how(*[float(a) if "." in a else int(a) for a in sys.argv[3:]])
print(json.dumps(counts))
