"""Connects with a blocking socket and asks for /."""
import socket
import sys

host, port = sys.argv[1], int(sys.argv[2])
try:
    with socket.create_connection((host, port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
        print(connection.makefile("rb").readline().decode().strip())
except OSError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(7)
