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


def add_pages(app: FastAPI) -> None:
    """Serve the page at `/`, the API's at `/docs`, and their files below `/page/`.

    They need no API key; the endpoints that they call do.
    """
    bodies = {file.name: file.read_bytes() for file in sorted(_FOLDER.iterdir()) if file.suffix in _TYPES}

    async def file(request: Request, name: str) -> Response:
        if name not in bodies:
            raise NotFoundError(f"There is nothing at {request.url.path}.")
        return _answer(request, name, bodies[name])

    async def index(request: Request) -> Response:
        return await file(request, "index.html")

    async def docs(request: Request) -> Response:
        return await file(request, "docs.html")

    for path, page in (("/", index), ("/docs", docs), (PAGE_PREFIX + "{name}", file)):
        app.add_api_route(path, page, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)


def _answer(request: Request, name: str, body: bytes) -> Response:
    tag = f'"{blake2b(body, digest_size=8).hexdigest()}"'
    headers = {**_HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return PlainResponse(status_code=304, headers=headers)
    return PlainResponse(body, media_type=_TYPES[Path(name).suffix], headers=headers)
