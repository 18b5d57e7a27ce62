"""Servers of the standard library in a thread, for as long as a test talks to them."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseServer
from typing import Any, TypeVar

Served = TypeVar("Served", bound=BaseServer)


@contextlib.contextmanager
def serving(server: Served) -> Iterator[Served]:
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class ModelServer(ThreadingHTTPServer):
    """Answers each request by `answer(body)`: a status, and what to say as JSON. Notes what it was asked."""

    daemon_threads = True

    def __init__(self, answer: Callable[[dict[str, Any]], tuple[int, Any]]):
        super().__init__(("127.0.0.1", 0), _ModelHandler)
        self.answer, self.requests = answer, list[tuple[str, str | None, dict[str, Any]]]()
        self.address = f"http://127.0.0.1:{self.server_address[1]}/v1"


class _ModelHandler(BaseHTTPRequestHandler):
    server: ModelServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, self.headers["Authorization"], body))
        status, content = self.server.answer(body)
        data = json.dumps(content).encode()
        self.send_response(status, "overloaded" if status >= 429 else None)
        self.send_header("Retry-After", "0")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing."""
