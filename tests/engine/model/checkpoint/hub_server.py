"""A Hugging Face Hub of one model, on a port of this machine: what its client asks for, ranges included."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

COMMIT = "c" * 40


class Hub:
    """Serves the files of `folder` as the model `model_id`.

    `sizes` are claimed of files in place of their own; a download of weights ends after `cut_bytes`, and one that asks
    for the rest is refused while `refuses_rest`.
    """

    def __init__(self, folder: Path, model_id: str = "org/tiny") -> None:
        self.folder = folder
        self.model_id = model_id
        self.sizes: dict[str, int] = {}
        self.cut_bytes: int | None = None
        self.refuses_rest = False
        self.ranges: list[str] = []  # asked for, of weights
        self.num_downloads = 0  # of weights
        self.url = ""

    def files(self) -> list[dict[str, Any]]:
        found = []
        for file in sorted(self.folder.iterdir()):
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            size = self.sizes.get(file.name, file.stat().st_size)
            found.append({"name": file.name, "size": size, "digest": digest, "is_lfs": file.suffix == ".safetensors"})
        return found

    def info(self) -> dict[str, Any]:
        siblings = [
            {
                "rfilename": each["name"],
                "size": each["size"],
                "blobId": each["digest"][:40],
                **(
                    {"lfs": {"size": each["size"], "sha256": each["digest"], "pointerSize": 1}}
                    if each["is_lfs"]
                    else {}
                ),
            }
            for each in self.files()
        ]
        return {"id": self.model_id, "sha": COMMIT, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0}

    def tree(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "file",
                "path": each["name"],
                "size": each["size"],
                "oid": each["digest"][:40],
                **_lfs(each, "oid"),
            }
            for each in self.files()
        ]


def _lfs(file: dict[str, Any], name_of_digest: str) -> dict[str, Any]:
    """Return the Hub's metadata of a file that is stored separately (weights)."""
    if not file["is_lfs"]:
        return {}
    return {"lfs": {"size": file["size"], name_of_digest: file["digest"], "pointerSize": 1}}


@contextmanager
def running_hub(folder: Path) -> Iterator[Hub]:
    """Yield a Hub that serves."""
    hub = Hub(folder)

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path, hub = self.path.partition("?")[0], self.hub
        if path.startswith(f"/api/models/{hub.model_id}/tree/"):
            self._send(200, json.dumps(hub.tree()).encode(), {"Content-Type": "application/json"}, with_body)
        elif path.startswith(f"/api/models/{hub.model_id}"):
            self._send(200, json.dumps(hub.info()).encode(), {"Content-Type": "application/json"}, with_body)
        elif path.startswith(f"/{hub.model_id}/resolve/"):
            self._file(path.rpartition("/")[2], with_body)
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no such model"}, with_body)

    def _file(self, name: str, with_body: bool) -> None:
        each = next((each for each in self.hub.files() if each["name"] == name), None)
        if each is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
            return
        digest = each["digest"] if each["is_lfs"] else each["digest"][:40]
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        body, asked = (self.hub.folder / name).read_bytes(), self.headers.get("Range")
        if each["is_lfs"] and with_body:
            self.hub.num_downloads += 1
            if asked:
                self.hub.ranges.append(asked)
        if asked and self.hub.refuses_rest:
            self._send(403, b"", {}, with_body)
        elif asked:
            first = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
            self._send(206, body[first:], headers, with_body)
        else:
            self._send(200, body, headers, with_body, self.hub.cut_bytes if each["is_lfs"] else None)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], with_body: bool, cut_bytes: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body[:cut_bytes])
        if cut_bytes is not None:
            self.close_connection = True
