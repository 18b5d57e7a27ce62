"""Stand-in for the Hugging Face hub, which cannot be reached where tests run: serves folders by the parts of the hub's
HTTP interface that its own client asks for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" + 34 * "0"
_API = re.compile(r"/api/(models|datasets)/(\w+/[\w-]+)/(revision|tree)/([^/?]+)")
_FILE = re.compile(r"/(datasets/)?(\w+/[\w-]+)/resolve/([^/]+)/(.+)")


class Hub(ThreadingHTTPServer):
    """models, datasets: folders by repository. asked: paths of files that were sent. commit: the newest one."""

    def __init__(self, models: dict[str, Path], datasets: dict[str, Path]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folders, self.asked = {"models": models, "datasets": datasets}, list[str]()
        self.commit = COMMIT

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if found := _API.match(self.path):
            kind, name, what, revision = found.groups()
            folder = self.server.folders[kind].get(name)
            if folder is None or revision not in ("main", COMMIT, self.server.commit):
                return self._missing("RepoNotFound" if folder is None else "RevisionNotFound")
            listed = [{"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _oid(path)}
                      for path in sorted(folder.iterdir())]
            siblings = [{"rfilename": each["path"]} for each in listed]
            body = listed if what == "tree" else {"id": name, "sha": self.server.commit, "siblings": siblings}
            return self._send(json.dumps(body).encode(), {"Content-Type": "application/json"})
        return self._file()

    do_HEAD = do_GET

    def _json(self, content: object) -> None:
        self._send(json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _file(self) -> None:
        found = _FILE.match(self.path)
        folder = self.server.folders["datasets" if found and found[1] else "models"].get(found[2]) if found else None
        if folder is None or not (path := folder / found[4]).is_file():
            return self._missing("RepoNotFound" if folder is None else "EntryNotFound")
        if self.command == "GET":
            self.server.asked.append(path.name)
        commit = self.server.commit if found[3] == "main" else found[3]
        return self._send(path.read_bytes(), {"X-Repo-Commit": commit, "ETag": f'"{_oid(path)}"'})

    def _missing(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *message: object) -> None: ...


def _oid(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
