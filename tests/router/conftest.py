"""A tokenizer, a served fake model, and clients for it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import cache

import httpx
import openai
import pytest
import uvicorn
from tokenizers import Tokenizer as TokenizerCore
from tokenizers import decoders, models, pre_tokenizers

from router.api_keys import ApiKeys
from router.backend import migration
from router.config import IngressConfig, IngressLimits
from router.generation.generation_service import GenerationService
from router.metrics.ingress_metrics import IngressMetrics
from router.openai.api import build_app
from router.tokenizer import Tokenizer
from router.tokenizer.chat_template import ChatTemplate
from router.tokenizer.tokenizer_files import TokenizerFiles
from tests.router.fixtures.fake_backend import FakeBackend

TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_tokenizer_core() -> TokenizerCore:
    """One token per byte: id 0 is <|end|>, id b + 1 is byte b; ids from 257 on are words of several bytes."""
    alphabet = _byte_alphabet()
    vocabulary = {"<|end|>": 0} | {alphabet[byte]: byte + 1 for byte in range(256)}
    core = TokenizerCore(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|end|>"])
    return core


def _byte_alphabet() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer_core())


@cache
def chat_template(source: str) -> ChatTemplate:
    """Return a template, the same one for the same source: its rules are learnt once, in a tenth of a second."""
    return ChatTemplate(source, {})


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def limits() -> IngressLimits:
    return IngressLimits(max_body_bytes=20_000)


@pytest.fixture(autouse=True)
def short_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a broken stream up soon."""
    monkeypatch.setattr(migration, "DEADLINE_S", 2.0)


@pytest.fixture
def service(backend: FakeBackend, tokenizer: Tokenizer, limits: IngressLimits) -> GenerationService:
    files = TokenizerFiles(tokenizer, chat_template(TEMPLATE))
    return GenerationService(
        backend, files, IngressConfig(model_id="fake", model_path="nowhere", limits=limits), IngressMetrics()
    )


@pytest.fixture
async def http(service: GenerationService) -> AsyncIterator[httpx.AsyncClient]:
    """The app without a server, for everything but streams and disconnects."""
    transport = httpx.ASGITransport(build_app(service, ApiKeys()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as client:
        yield client


@pytest.fixture
async def base_url(service: GenerationService) -> AsyncIterator[str]:
    """The app on a real server, in the test's own loop."""
    server = uvicorn.Server(uvicorn.Config(build_app(service, ApiKeys()), log_level="error", lifespan="off"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve([listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        serving.cancel()  # its own way to end sleeps for two tenths of a second, in each of a hundred tests
        with suppress(asyncio.CancelledError):
            await serving
        for each in server.servers:
            each.close()


def openai_client(base_url: str, **options: bool) -> openai.AsyncOpenAI:
    """Return OpenAI's client without certificates, which would be read once per test and are not needed here."""
    transport = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, http_client=transport, **options)


@pytest.fixture
async def client(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(base_url, _strict_response_validation=True) as strict:
        yield strict


@pytest.fixture
async def lenient_client(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client for streamed completions.

    Their finish reason is null until the end, in OpenAI's own streams as well, and the package's type does not allow
    that.
    """
    async with openai_client(base_url) as lenient:
        yield lenient
