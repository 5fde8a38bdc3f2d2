"""The pages at `/` and `/docs`: plain files, read once, and served with a policy that lets nothing else run."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from fastapi import FastAPI, Request, Response
from starlette.responses import Response as PlainResponse

from protos.errors import NotFoundError

_FOLDER = Path(__file__).parent.parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # each visit asks again; an unchanged file is answered with 304
}
PAGE_PREFIX = "/page/"


class StaticPage:
    """The files of `router/page`, by name. They need no API key; the endpoints that they call do."""

    def __init__(self) -> None:
        files = sorted(file for file in _FOLDER.iterdir() if file.suffix in _TYPES)
        self._bodies = {file.name: file.read_bytes() for file in files}

    def add_routes(self, app: FastAPI) -> None:
        """Serve the page at `/`, the API's at `/docs`, and their files below `/page/`."""
        app.add_api_route("/", self.index, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)
        app.add_api_route("/docs", self.docs, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)
        app.add_api_route(
            PAGE_PREFIX + "{name}", self.file, methods=["GET", "HEAD"], response_model=None, include_in_schema=False
        )

    async def index(self, request: Request) -> Response:
        """Answer with the page."""
        return self._answer(request, "index.html")

    async def docs(self, request: Request) -> Response:
        """Answer with the page that shows the OpenAPI document."""
        return self._answer(request, "docs.html")

    async def file(self, request: Request, name: str) -> Response:
        """Answer with one of the page's files. Raises NotFoundError for another name."""
        if name not in self._bodies:
            raise NotFoundError(f"There is nothing at {request.url.path}.")
        return self._answer(request, name)

    def _answer(self, request: Request, name: str) -> Response:
        body = self._bodies[name]
        tag = f'"{blake2b(body, digest_size=8).hexdigest()}"'
        headers = {**_HEADERS, "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return PlainResponse(status_code=304, headers=headers)
        return PlainResponse(body, media_type=_TYPES[Path(name).suffix], headers=headers)
