"""Programs whose retries are known: python3 truth.py HOW HOST PORT SECONDS RATE RETRIES.

Each asks for about RATE operations a second, every one with a name of its own, so that the server knows a
retry when it sees one. Told as JSON: operations (`calls`) and, as the program itself has counted or logged
them, `retries`. With RETRIES 0 it never retries. (`good` counts operations that went well, where the program is a
plain loop.)
"""

import asyncio
import http.client
import importlib
import json
import random
import sys
import threading
import time

how, host, port, seconds, rate, most = sys.argv[1:7]
port, seconds, rate, most = int(port), float(seconds), float(rate), int(most)
counts = {"calls": 0, "retries": 0, "good": 0}
lock = threading.Lock()
WORKERS = 20
PACKAGES = {
    "urllib3": "urllib3",
    "tenacity": "tenacity",
    "tenacity_waits": "tenacity",
    "redis": "redis",
    "libpq": "psycopg2",
    "aiohttp": "aiohttp",
}
# It takes its time, which is none of the measurement's.
package = importlib.import_module(PACKAGES[how]) if how in PACKAGES else None
end = time.monotonic() + seconds


def count(**what):
    with lock:
        for key, number in what.items():
            counts[key] += number


def name():
    with lock:
        counts["calls"] += 1
        return f"/{how}/{counts['calls']}"


def even(share=1):
    """A pause about as long as the last one."""
    time.sleep(random.uniform(0.5, 1.5) * share / rate)


def at_random(share=1):
    return random.expovariate(1 / share) / rate


def is_left():
    return time.monotonic() < end


class Failed(Exception):
    pass


def ask(path):
    """One attempt on a connection of its own."""
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        if answer.status >= 500:
            raise Failed
    except (OSError, http.client.HTTPException) as error:
        raise Failed from error
    finally:
        connection.close()


def operation():
    """A loop as most programs have it."""
    path = name()
    for number in range(most + 1):
        if number > 0:
            count(retries=1)
        try:
            ask(path)
            count(good=1)
            return
        except Failed:
            pass


def together(work):
    pool = [threading.Thread(target=work) for _ in range(WORKERS)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()


def sequence():
    while is_left():
        operation()
        even()


def threads():
    """Workers that pause at random."""

    def work():
        while is_left():
            operation()
            time.sleep(at_random(WORKERS))

    together(work)


def thread_each():
    """A thread for each operation, begun at random times, as servers do it."""
    pool = []
    while is_left():
        pool.append(threading.Thread(target=operation))
        pool[-1].start()
        time.sleep(at_random())
    for thread in pool:
        thread.join()


def kept():
    """Workers that keep their connection from call to call, and dial when it has failed."""

    def work():
        connection = http.client.HTTPConnection(host, port, timeout=5)
        while is_left():
            try:
                connection.request("GET", name(), headers={"Connection": "keep-alive"})
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                connection.close()
            time.sleep(at_random(WORKERS))

    together(work)


def crawl():
    """Workers that pause with what they got, and take up other work at once when a call fails."""

    def work():
        while is_left():
            try:
                ask(name())
                time.sleep(random.uniform(0.5, 1.5) * WORKERS / rate)
            except Failed:
                pass

    together(work)


def urllib3_retry():
    retry = package.Retry(total=most, status_forcelist=[503], raise_on_status=False)
    with package.PoolManager(retries=retry) as pool:
        while is_left():
            try:
                answer = pool.request("GET", f"http://{host}:{port}{name()}")
                count(retries=len(answer.retries.history))
            except package.exceptions.MaxRetryError:
                count(retries=most)
            even()


def tenacity_retry(**waits):
    asking = package.retry(stop=package.stop_after_attempt(most + 1), reraise=True, **waits)(ask)
    while is_left():
        try:
            asking(name())
        except Failed:
            pass
        count(retries=asking.statistics["attempt_number"] - 1)
        even()


def redis_retry():
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    class Counting(NoBackoff):
        def compute(self, failures):
            count(retries=1)
            return super().compute(failures)

    client = package.Redis(host=host, port=port, protocol=2, retry=Retry(Counting(), most))
    while is_left():
        try:
            client.get(name())
        except package.exceptions.ConnectionError:
            pass
        even()


def libpq():
    """One that goes to the next host when one fails."""
    hosts = ",".join([host] * 3)
    ports = ",".join(str(port + number) for number in range(3))
    while is_left():
        count(calls=1)
        try:
            connection = package.connect(
                host=hosts, port=ports, user="nobody", dbname="any", gssencmode="disable"
            )
            connection.close()
        except package.OperationalError:
            pass
        even()


async def ask_async(path):
    writer = None
    try:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        line = await reader.readline()
        await reader.read()
        if line.split()[1:2] != [b"200"]:
            raise Failed
    except OSError as error:
        raise Failed from error
    finally:
        if writer is not None:
            writer.close()


async def event_loop(asking):
    """Operations begun at random times, whether or not others are under way."""

    async def one():
        path = name()
        for number in range(most + 1):
            if number > 0:
                count(retries=1)
            try:
                return await asking(path)
            except Failed:
                pass

    tasks = []
    while is_left():
        tasks.append(asyncio.create_task(one()))
        await asyncio.sleep(at_random())
    await asyncio.gather(*tasks)


async def aiohttp_loop():
    async with package.ClientSession(f"http://{host}:{port}") as session:

        async def asking(path):
            try:
                async with session.get(path) as answer:
                    await answer.read()
                    if answer.status >= 500:
                        raise Failed
            except package.ClientError as error:
                raise Failed from error

        await event_loop(asking)


{
    "sequence": sequence,
    "threads": threads,
    "thread_each": thread_each,
    "kept": kept,
    "crawl": crawl,
    "urllib3": urllib3_retry,
    "tenacity": tenacity_retry,
    "tenacity_waits": lambda: tenacity_retry(wait=package.wait_random(0, 0.05)),
    "redis": redis_retry,
    "libpq": libpq,
    "asyncio": lambda: asyncio.run(event_loop(ask_async)),
    "aiohttp": lambda: asyncio.run(aiohttp_loop()),
}[how]()
print(json.dumps(counts))
