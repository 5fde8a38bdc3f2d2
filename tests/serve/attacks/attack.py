"""The served application, the table of attacks, and requests over HTTP, for all attacks."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

TIMEOUT_S = 60.0
BROKEN = "broken: "  # before an answer that breaks a promise
STILL_OPEN = f"{BROKEN}still open"  # a stalled connection that the server has not closed


@dataclass(frozen=True, slots=True)
class Face:
    """The addresses of an application, the name of its model, and an API key; any key if the server needs none.

    `keys_file` has the keys of a server that needs one, and `logs` are the server's logs and folders of logs.
    """

    host: str
    http_port: int
    grpc_port: int
    model: str
    key: str = "none"
    keys_file: Path | None = None
    logs: Sequence[Path] = ()

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.http_port}"


Answers = Counter[str]
Attack = Callable[[Face], Awaitable[Answers]]
ATTACKS: dict[str, Attack] = {}
TENANT_ATTACKS: dict[str, Attack] = {}  # on a server with keys of `TENANTS`
TENANTS = ("alice-secret-customer", "bob")


def attack(name: str, *, on_tenants: bool = False) -> Callable[[Attack], Attack]:
    """Enter an attack into the table under its name."""

    def register(attack: Attack) -> Attack:
        (TENANT_ATTACKS if on_tenants else ATTACKS)[name] = attack
        return attack

    return register


@attack("no attack, for ten seconds")
async def _nothing(face: Face) -> Answers:
    await asyncio.sleep(10.0)
    return Counter()


async def post_all(face: Face, bodies: list[Any], path: str = "/v1/completions", **headers: str) -> Answers:
    """Post all bodies at once: bytes unchanged, others as JSON with the model's name."""
    async with httpx.AsyncClient(base_url=face.url, timeout=TIMEOUT_S, limits=httpx.Limits()) as client:
        return Counter(await asyncio.gather(*(_post(client, path, face, body, headers) for body in bodies)))


async def _post(client: httpx.AsyncClient, path: str, face: Face, body: Any, headers: dict[str, str]) -> str:
    content = body if isinstance(body, bytes) else json.dumps({"model": face.model, "max_tokens": 8, **body}).encode()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        answer = await client.post(path, content=content, headers={**face.headers, **names})
    except httpx.HTTPError as error:
        return type(error).__name__
    return status_of(answer)


def status_of(answer: httpx.Response) -> str:
    """Return the status, and mark a 5xx other than a 503 with Retry-After as broken."""
    is_busy = answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and "retry-after" in answer.headers
    return f"{BROKEN}{answer.status_code}" if answer.is_server_error and not is_busy else str(answer.status_code)
