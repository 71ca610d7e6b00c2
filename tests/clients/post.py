"""Clients that post: python3 post.py HOW URL CALL..., where a call is a method (KEY: POST with an Idempotency-Key) and a
body. Prints a line for each: the status, or what has failed.
"""

import http.client
import sys
import urllib.parse

how, url = sys.argv[1:3]
parts = urllib.parse.urlsplit(url)


def with_http_client(method, body, headers):
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    try:
        connection.request(method, parts.path, body or None, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def with_urllib3(method, body, headers):
    return pool.request(method, url, body=body or None, headers=headers, retries=retries).status


def with_requests(method, body, headers):
    return session.request(method, url, data=body or None, headers=headers, timeout=60).status_code


ask = with_http_client
if how == "requests":
    import requests

    session = requests.Session()
    ask = with_requests
elif how in ("urllib3", "Retry"):
    import urllib3

    pool = urllib3.PoolManager(timeout=60)
    retries = False
    if how == "Retry":
        retries = urllib3.Retry(3, allowed_methods=["POST"], status_forcelist=[503])
    ask = with_urllib3

for call in sys.argv[3:]:
    method, _, body = call.partition(" ")
    headers = {"Content-Type": "application/json"}
    if method == "KEY":
        method = "POST"
        headers["Idempotency-Key"] = "7"
    try:
        print(ask(method, body, headers))
    except Exception as error:
        print(repr(error).replace("\n", " "))
