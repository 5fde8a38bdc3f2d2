"""The Serve deployment and its adapter, in Serve's local testing mode (no cluster)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2
from ray import serve
from ray.serve.handle import DeploymentHandle

from protos import outrider_pb2 as pb2
from protos.errors import OverloadedError, RequestError
from protos.messages import GenerateRequest, TokenChunk
from protos.served_model import ModelCard
from router.config import IngressConfig
from router.ingress import GRPC_SERVICER_FUNCTIONS, Ingress
from tests.router.conftest import byte_tokenizer_core
from tests.router.fixtures.fake_backend import CARD, FakeBackend
from tests.router.grpc_api.test_grpc_api import ServeContext


@serve.deployment(name="Pair")
class FakePair:
    """The pair deployment's three methods."""

    def __init__(self) -> None:
        self.backend = FakeBackend()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[list[TokenChunk], None]:
        if request.prompt_token_ids == (99,):
            raise OverloadedError("full", retry_after_s=3.0)
        async for batch in self.backend.generate(request):
            yield list(batch)

    async def describe(self) -> ModelCard:
        return CARD

    async def metrics_text(self) -> str:
        return ""


@pytest.fixture
def handle(tmp_path: Path) -> DeploymentHandle:
    byte_tokenizer_core().save(str(tmp_path / "tokenizer.json"))
    config = IngressConfig(model_id="fake", model_path=str(tmp_path))
    return serve.run(Ingress.bind(FakePair.bind(), config), _local_testing_mode=True)


def test_a_grpc_call_reaches_the_pair_and_comes_back(handle: DeploymentHandle) -> None:
    request = pb2.GenerateRequest(model="fake", prompt="abc", max_tokens=5)
    answer = handle.Generate.remote(request, ServeContext()).result()
    assert answer.choices[0].text == "defgh"
    chunks = list(handle.options(stream=True).GenerateStream.remote(request, ServeContext()))
    assert "".join(chunk.text for chunk in chunks) == "defgh"
    tokens = handle.Tokenize.remote(pb2.TokenizeRequest(model="fake", prompt="a"), ServeContext()).result()
    assert list(tokens.tokens) == [98]
    assert handle.GetModel.remote(pb2.GetModelRequest(), ServeContext()).result().id == "fake"
    health = handle.Check.remote(health_pb2.HealthCheckRequest(), ServeContext()).result()
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_both_services_have_a_call_of_the_same_name(tmp_path: Path) -> None:
    vllm = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2", reason="pip install 'outrider[smg]'")
    byte_tokenizer_core().save(str(tmp_path / "tokenizer.json"))
    config = IngressConfig(model_id="fake", model_path=str(tmp_path))
    handle = serve.run(Ingress.bind(FakePair.bind(), config), _local_testing_mode=True)
    tokens = vllm.TokenizedInput(input_ids=[98, 99])
    request = vllm.GenerateRequest(tokenized=tokens, sampling_params=vllm.SamplingParams(max_tokens=5))
    [answer] = handle.options(stream=True).Generate.remote(request.SerializeToString(), ServeContext())
    assert list(answer.complete.output_ids) == [100, 101, 102, 103, 104]
    ours = handle.Generate.remote(pb2.GenerateRequest(prompt="ab", max_tokens=5), ServeContext()).result()
    assert ours.choices[0].text == "cdefg"
    info = handle.GetModelInfo.remote(b"", grpc_context=ServeContext()).result()
    assert info.served_model_name == "fake"


def test_the_pair_s_errors_arrive_as_they_were(handle: DeploymentHandle) -> None:
    context = ServeContext()
    with pytest.raises(OverloadedError):
        handle.Generate.remote(pb2.GenerateRequest(model="fake", prompt_token_ids=[99]), context).result()
    with pytest.raises(RequestError):
        handle.Generate.remote(pb2.GenerateRequest(model="fake"), ServeContext()).result()


def test_the_servicer_functions_can_be_imported() -> None:
    for path in GRPC_SERVICER_FUNCTIONS:
        module, _, name = path.rpartition(".")
        assert callable(getattr(__import__(module, fromlist=[name]), name))
