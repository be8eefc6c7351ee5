"""Real servers on this machine that take alerts, hang, or are not there."""

import http.server
import json
import socket
import threading

import pytest

SECRET = "s3cr3t-t0ken"  # noqa: S105 - a made-up one, to look for


class Server:
    """Takes POSTs; `hold()` makes it read a request and not answer it until `release()`."""

    def __init__(self, status=200):
        self.posts = []
        self.reached = threading.Event()
        self._may_answer = threading.Event()
        self._may_answer.set()
        self._arrived = threading.Condition()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with outer._arrived:
                    outer.posts.append(json.loads(body))
                    outer._arrived.notify_all()
                outer.reached.set()
                outer._may_answer.wait(60)
                self.send_response(status)
                self.end_headers()

            def log_message(self, *args):
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_port
        self.url = f"json://user:{SECRET}@127.0.0.1:{self.port}/hook/{SECRET}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def hold(self):
        self._may_answer.clear()

    def release(self):
        self._may_answer.set()

    @property
    def holds(self):
        return not self._may_answer.is_set()

    def wait_for(self, count):
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.posts) >= count, 30), self.posts
        return self.posts

    def titles(self):
        return [post["title"] for post in self.posts]

    def close(self):
        self.release()
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Server()
    monkeypatch.setenv("HOOK", server.url)
    yield server
    server.close()


@pytest.fixture
def closed_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def dead_url(monkeypatch, closed_port):
    """Name a webhook that nobody listens at."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("DEAD", f"json://user:{SECRET}@127.0.0.1:{closed_port}/hook/{SECRET}")
    return "env:DEAD"


@pytest.fixture
def secret():
    return SECRET
