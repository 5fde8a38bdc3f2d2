"""A receipt proves an answer: to a reader with the public key, over every interface, and whatever was drafted."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from engine.engine_core import EngineCore
from protos import outrider_pb2 as pb2
from protos.errors import ConfigError, UnavailableError
from protos.messages import VerifyMode
from protos.served_model import FingerprintPart, digest, write_fingerprint
from router.api_keys import ApiKeys
from router.config import IngressConfig
from router.generation.generation_service import GenerationService
from router.generation.receipts import Receipt, check_receipt, digest_of_ids, read_private_key, read_public_key
from router.grpc_api.api import GrpcApi
from router.metrics.ingress_metrics import IngressMetrics
from router.openai.api import build_app
from router.tokenizer import Tokenizer
from router.tokenizer.chat_template import ChatTemplate
from router.tokenizer.tokenizer_files import TokenizerFiles, load_tokenizer_files
from tests.router.conftest import TEMPLATE
from tests.router.fixtures.engine_backend import CARD, EngineBackend, ngram_engine, write_model
from tests.router.fixtures.fake_backend import FakeBackend

PARTS = (FingerprintPart.WEIGHTS, FingerprintPart.DRAFT, FingerprintPart.KERNELS, FingerprintPart.SETTINGS)
FINGERPRINT = write_fingerprint({part: digest(part) for part in PARTS})
BODY: dict[str, Any] = {
    "prompt": "abcabcabcabcabc",
    "max_tokens": 24,
    "temperature": 1.0,
    "return_token_ids": True,
    "receipt": True,
}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "abcabcabc"}],
    "max_tokens": 12,
    "receipt": True,
    "seed": 4,
}
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def core(folder: Path) -> EngineCore:
    return ngram_engine(folder)


def key_file(folder: Path, key: Any = KEY) -> str:
    file = folder / "receipts.pem"
    file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return str(file)


def service_of(core: EngineCore, folder: Path, *, has_key: bool = True, **card: Any) -> GenerationService:
    backend = EngineBackend(core, replace(CARD, fingerprint=FINGERPRINT, max_draft_tokens=8, **card))
    files = load_tokenizer_files(str(folder))
    files = replace(files, chat_template=ChatTemplate(TEMPLATE, {}))
    key = key_file(folder) if has_key else None
    config = IngressConfig(model_id="tiny", model_path="nowhere", receipt_key_file=key)
    return GenerationService(backend, files, config, IngressMetrics())


def client_of(service: GenerationService) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(build_app(service, ApiKeys())), base_url="http://outrider")


@pytest.fixture
async def http(core: EngineCore, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(service_of(core, folder)) as client:
        yield client


async def answer_of(http: httpx.AsyncClient, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    data: dict[str, Any] = answer.json()
    return data


async def events_of(http: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = await http.post(path, json={**body, "stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_a_stranger_can_check_a_receipt_with_the_public_key_alone(http: httpx.AsyncClient) -> None:
    answer = await answer_of(http, **BODY, n=2)
    receipt = answer["receipt"]
    signature = base64.b64decode(receipt.pop("signature"))
    signed = json.dumps(receipt, sort_keys=True, separators=(",", ":")).encode()
    KEY.public_key().verify(signature, signed)
    assert receipt["id"] == answer["id"]
    assert receipt["model"] == "tiny"
    for choice, proof in zip(answer["choices"], receipt["choices"], strict=True):
        for name, ids in (("tokens", choice["token_ids"]), ("prompt", choice["prompt_token_ids"])):
            assert proof[name] == sha256(b"".join(token.to_bytes(4, "little") for token in ids)).hexdigest()
        assert proof["num_tokens"] == len(choice["token_ids"])
    assert [receipt[part] for part in PARTS[1:]] == [digest(part) for part in PARTS[1:]]


async def test_no_field_of_a_receipt_can_be_changed(http: httpx.AsyncClient) -> None:
    receipt = Receipt.model_validate((await answer_of(http, **BODY))["receipt"])
    assert check_receipt(receipt)
    for name in Receipt.model_fields:
        value = getattr(receipt, name)
        changed = [] if isinstance(value, list) else value + 1 if isinstance(value, int) else value[:-4] + "AAA="
        assert not check_receipt(receipt.model_copy(update={name: changed})), name


async def test_drafts_of_any_length_stops_and_streams_leave_the_same_receipt(http: httpx.AsyncClient) -> None:
    asked = {**BODY, "seed": 11, "stop": ["q", "zz"]}
    plain = await answer_of(http, **asked, speculation={"enabled": False})
    for length in range(1, 9):
        answer = await answer_of(http, **asked, speculation={"num_tokens": length})
        assert content(answer["receipt"]) == content(plain["receipt"]), length
    [*_, last] = await events_of(http, "/v1/completions", **asked)
    assert content(last["receipt"]) == content(plain["receipt"])


def content(receipt: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in receipt.items() if name not in ("id", "created", "signature")}


async def test_an_answer_that_moves_to_another_pair_has_the_same_receipt(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = IngressConfig(model_id="fake", model_path="nowhere", receipt_key_file=key_file(tmp_path))
    receipts, num_attempts = [], []
    for failures in ([], [UnavailableError("gone")]):
        backend = FakeBackend(failures=list(failures), fail_after=4)
        service = GenerationService(backend, TokenizerFiles(tokenizer), config, IngressMetrics())
        async with client_of(service) as http:
            asked: dict[str, Any] = {"prompt": "abc", "max_tokens": 9, "seed": 1, "receipt": True}
            receipts.append(content((await answer_of(http, **asked))["receipt"]))
        num_attempts.append(len(backend.requests))
    assert num_attempts == [1, 2]
    assert receipts[0] == receipts[1]
    assert receipts[0]["choices"][0]["num_tokens"] == 9


async def test_a_drawn_seed_is_in_the_receipt_and_gives_the_same_answer(http: httpx.AsyncClient) -> None:
    first = await answer_of(http, **BODY)
    second = await answer_of(http, **BODY, seed=first["receipt"]["seed"])
    assert content(second["receipt"]) == content(first["receipt"])
    assert content((await answer_of(http, **BODY))["receipt"]) != content(first["receipt"])


@pytest.mark.parametrize("change", [{"top_p": 0.5}, {"stop": ["q"]}, {"max_tokens": 23}, {"guided_regex": "[abc]{9}"}])
async def test_another_parameter_is_another_digest_of_sampling(http: httpx.AsyncClient, change: dict[str, Any]) -> None:
    asked = {**BODY, "seed": 5}
    one, other = await answer_of(http, **asked), await answer_of(http, **{**asked, **change})
    assert one["receipt"]["sampling"] != other["receipt"]["sampling"]
    more = await answer_of(http, **asked, logprobs=2, prompt_logprobs=1)
    assert content(more["receipt"]) == content(one["receipt"])


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
async def test_every_endpoint_answers_with_the_same_receipt(http: httpx.AsyncClient, options: dict[str, Any]) -> None:
    full = await answer_of(http, "/v1/chat/completions", **CHAT)
    streamed = await events_of(http, "/v1/chat/completions", **CHAT, **options)
    assert [each["receipt"] for each in streamed if "receipt" in each] == [streamed[-1]["receipt"]]
    turn = {"messages": CHAT["messages"], "max_tokens": 12, "receipt": True, "seed": 4}
    message, events = await answer_of(http, "/v1/messages", **turn), await events_of(http, "/v1/messages", **turn)
    asked = {"input": "abcabcabc", "max_output_tokens": 12, "receipt": True, "seed": 4}
    response = await answer_of(http, "/v1/responses", **asked)
    response_events = await events_of(http, "/v1/responses", **asked)
    receipts = [
        full["receipt"],
        streamed[-1]["receipt"],
        message["receipt"],
        events[-2]["receipt"],
        response["receipt"],
        response_events[-1]["response"]["receipt"],
    ]
    assert all(check_receipt(Receipt.model_validate(each)) for each in receipts)
    assert all(content(each) == content(receipts[0]) for each in receipts)


async def test_nobody_who_has_not_asked_gets_a_receipt(http: httpx.AsyncClient) -> None:
    assert "receipt" not in await answer_of(http, **{**BODY, "receipt": None})


class Call:
    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


async def test_calls_of_grpc_answer_with_the_receipt_of_http(
    http: httpx.AsyncClient, core: EngineCore, folder: Path
) -> None:
    api = GrpcApi(service_of(core, folder), ApiKeys())
    request = pb2.GenerateRequest(prompt=BODY["prompt"], max_tokens=24, temperature=1.0, seed=11, receipt=True)
    context: Any = Call()
    full = json.loads((await api.Generate(request, context)).receipt)
    chunks = [chunk async for chunk in api.GenerateStream(request, context)]
    assert [bool(chunk.receipt) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    expected = content((await answer_of(http, **BODY, seed=11))["receipt"])
    assert content(full) == content(json.loads(chunks[-1].receipt)) == expected


async def test_a_key_with_receipts_asks_for_them_and_a_request_may_decline(core: EngineCore, folder: Path) -> None:
    keys = folder / "keys"
    keys.write_text("plain\nproved receipts=true\n")
    app = build_app(service_of(core, folder), ApiKeys(str(keys)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://outrider") as http:
        for key, wish, is_there in (("plain", None, 0), ("proved", None, 1), ("proved", False, 0), ("plain", True, 1)):
            http.headers["Authorization"] = f"Bearer {key}"
            assert ("receipt" in await answer_of(http, **{**BODY, "receipt": wish})) == is_there


@pytest.mark.parametrize(
    ("has_key", "card", "body", "reason"),
    [
        (False, {}, {}, "ingress.receipt_key_file"),
        (True, {}, {"speculation": {"verify": "rejection"}}, "speculation is 'rejection' here"),
        (True, {"verify": VerifyMode.BLOCK}, {}, "speculation is 'block' here"),
        (True, {"has_approximate_steps": True}, {"speculation": {"mode": "approximate"}}, "'approximate' here"),
    ],
)
async def test_a_receipt_that_would_prove_nothing_is_refused(
    core: EngineCore, folder: Path, has_key: bool, card: dict[str, Any], body: dict[str, Any], reason: str
) -> None:
    async with client_of(service_of(core, folder, has_key=has_key, **card)) as http:
        answer = await http.post("/v1/completions", json={**BODY, **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "receipt"
    assert reason in answer.json()["error"]["message"]


def test_a_file_without_a_key_is_refused_with_the_command_that_makes_one(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no key")
    other = key_file(tmp_path, ec.generate_private_key(ec.SECP256R1()))
    for path in (tmp_path / "missing", tmp_path / "text", other):
        with pytest.raises(ConfigError, match=r"ingress\.receipt_key_file"):
            read_private_key(str(path))
    with pytest.raises(ConfigError, match="openssl genpkey"):
        read_private_key(other)
    with pytest.raises(ConfigError, match="holds no public key"):
        read_public_key(str(tmp_path / "text"))


def test_the_public_key_of_the_operators_file_is_that_of_receipts(tmp_path: Path) -> None:
    public = tmp_path / "public.pem"
    public.write_bytes(KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    assert base64.b64decode(read_public_key(str(public))) == KEY.public_key().public_bytes_raw()
    assert digest_of_ids([1, 258]) == sha256(b"\1\0\0\0\2\1\0\0").hexdigest()
