"""A web server whose answers are given, as bytes, by the end of a request's path."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "x"}]})


@contextmanager
def answering(answer: bytes | str, kind: str = "application/json", models: bytes | str = MODELS) -> Iterator[str]:
    """Serve `models` at /models and `answer` at every other path; yield the address of the API."""

    class FakeHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(models, "application/json") if self.path.endswith("/models") else self._send(answer, kind)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._send(answer, kind)

        def _send(self, body: bytes | str, kind: str) -> None:
            data = body.encode() if isinstance(body, str) else body
            if data.startswith(b"HTTP/"):  # the whole answer
                self.wfile.write(data)
                return
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def events(*values: Any) -> bytes:
    """Return a stream of events, of bytes as they are and of other values as JSON."""
    pieces = (value if isinstance(value, bytes) else json.dumps(value).encode() for value in values)
    return b"".join(b"data: " + piece + b"\n\n" for piece in pieces)
