"""Asks for / on one connection: argv is address, port, count. Prints the wait for each answer, us."""
import http.client
import sys
import time

connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]))
for _ in range(int(sys.argv[3])):
    connection.request("GET", "/")
    asked = time.monotonic_ns()
    response = connection.getresponse()
    print((time.monotonic_ns() - asked) / 1000)
    response.read()
