"""The server without Ray over a model of twenty lines, in a test's loop or as a process: `python -m ... PORT`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from cluster.local.http_server import HttpServer, Places
from cluster.local.serve_environment import free_port
from router.api_keys import ApiKeys
from router.config import IngressConfig
from router.generation.generation_service import GenerationService
from router.metrics.ingress_metrics import IngressMetrics
from router.openai.api import build_app
from router.tokenizer import Tokenizer
from router.tokenizer.chat_template import ChatTemplate
from router.tokenizer.tokenizer_files import TokenizerFiles
from tests.router.conftest import TEMPLATE, byte_tokenizer_core
from tests.router.fixtures.fake_backend import FakeBackend


def fake_service(config: IngressConfig | None = None) -> GenerationService:
    files = TokenizerFiles(Tokenizer(byte_tokenizer_core()), ChatTemplate(TEMPLATE, {}))
    return GenerationService(
        FakeBackend(), files, config or IngressConfig(model_id="fake", model_path="nowhere"), IngressMetrics()
    )


@asynccontextmanager
async def serving(
    places: Places | None = None,
    tls: tuple[str | None, str | None] = (None, None),
    keys: ApiKeys | None = None,
    service: GenerationService | None = None,
) -> AsyncIterator[int]:
    """Serve at a port, which is yielded, until the block ends."""
    port = free_port()
    app = build_app(service or fake_service(), keys or ApiKeys())
    server = HttpServer(app, "127.0.0.1", port, places or Places(), tls)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  # uvicorn has no event
        await asyncio.sleep(0.01)
    try:
        yield port
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        for each in server.servers:
            each.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()


async def _main(port: int) -> None:
    await HttpServer(build_app(fake_service(), ApiKeys()), "127.0.0.1", port, Places(), (None, None)).serve()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
