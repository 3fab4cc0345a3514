"""A model hub small enough for a test: one repository on a local port."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c" * 40


@contextmanager
def serve_hub(repository: str, files: Mapping[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve the files as `repository`; gives the address and the list of files fetched so far."""
    fetched: list[str] = []
    api = f"/api/models/{repository}"
    listing = [
        {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
        for name, content in files.items()
    ]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            if path == f"{api}/revision/main":
                self._answer(json.dumps({"id": repository, "sha": COMMIT}).encode())
            elif path == f"{api}/tree/{COMMIT}":
                self._answer(json.dumps(listing).encode())
            else:
                self._file(path.removeprefix(f"/{repository}/resolve/{COMMIT}/"))

        do_HEAD = do_GET

        def _file(self, name: str) -> None:
            if name not in files:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.end_headers()
                return
            if self.command == "GET":
                fetched.append(name)
            self._answer(files[name])

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", fetched
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
