"""Connects with asyncio and asks for /."""
import asyncio
import sys


async def main(host, port):
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
    print((await reader.readline()).decode().strip())
    writer.close()


try:
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
except OSError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(7)
