"""A layer of a chain: python3 layer.py PORT NEXT_HOST NEXT_PORT. Serves HTTP on loopback, a thread for each
request; for each it asks the next layer, and once more if that has failed."""

import http.client
import http.server
import sys


def ask():
    connection = http.client.HTTPConnection(sys.argv[2], int(sys.argv[3]), timeout=10)
    try:
        connection.request("GET", "/")
        answer = connection.getresponse()
        answer.read()
        return answer.status < 500
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class Layer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if ask() or ask() else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 1024


server = Server(("127.0.0.1", int(sys.argv[1])), Layer)
print("ready", flush=True)
server.serve_forever()
