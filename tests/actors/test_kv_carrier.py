"""The way of KV blocks: the configured one or an error, and for auto the best one, with the reason in the log."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.kv_transport import DirectBlocks, NixlCarrier, choose_carrier
from actors.settings import KVTransportKind
from protos.errors import ConfigError


def has(monkeypatch: pytest.MonkeyPatch, *, gpu: bool, nixl: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(NixlCarrier, "problem", staticmethod(lambda: None if nixl else "ModuleNotFoundError: nixl"))


@pytest.mark.parametrize(
    ("kind", "gpu", "nixl", "is_direct", "reason"),
    [
        (KVTransportKind.AUTO, False, True, False, "without a GPU"),
        (KVTransportKind.AUTO, True, True, True, "GPU to GPU"),
        (KVTransportKind.AUTO, True, False, False, "ModuleNotFoundError: nixl"),
        (KVTransportKind.OBJECT_STORE, True, True, False, "as configured"),
        (KVTransportKind.NIXL, False, True, True, "main memory"),
    ],
)
def test_the_carrier_is_chosen_and_the_reason_logged(
    kind: KVTransportKind,
    gpu: bool,
    nixl: bool,
    is_direct: bool,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    has(monkeypatch, gpu=gpu, nixl=nixl)
    with caplog.at_level(logging.INFO):
        assert isinstance(choose_carrier(kind), NixlCarrier) == is_direct
    assert reason in caplog.text


def test_a_carrier_that_cannot_be_loaded_is_an_error_with_reason_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, gpu=True, nixl=False)
    with pytest.raises(ConfigError, match=r"'nixl', which this process cannot use \(ModuleNotFoundError: nixl\)"):
        choose_carrier(KVTransportKind.NIXL)


class Manager:
    """Ray's manager of NIXL, which notes the stream that it waits for and the one whose memory it takes."""

    def __init__(self) -> None:
        self.stream: str | None = "all of the engine's"
        self.current = "engine's"

    @contextmanager
    def use(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def set_cuda_stream(self, stream: str) -> None:
        self.stream = stream

    def extract_tensor_transport_metadata(self, key: str, blocks: list[Any]) -> SimpleNamespace:
        return SimpleNamespace(tensor_device=blocks[0].device.type)

    def get_communicator_metadata(self, *_: object) -> None: ...

    def fetch_multiple_tensors(self, *_: object) -> list[str]:
        return [self.current]

    def wait_fetch_complete(self, request: list[str], timeout_s: float) -> list[str]:
        return request


@pytest.mark.parametrize(
    ("device", "waited", "taken"), [("cuda", "side", "side"), ("cpu", "all of the engine's", "engine's")]
)
def test_blocks_of_a_gpu_leave_and_arrive_next_to_the_passes(
    device: str, waited: str, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that arrive in memory of the engine's stream could overwrite what an issued pass has yet to read."""
    manager, carrier = Manager(), NixlCarrier()
    monkeypatch.setitem(vars(carrier), "_manager", manager)
    monkeypatch.setattr("actors.kv_transport.side_stream", lambda _: "side")
    monkeypatch.setattr(torch.cuda, "stream", manager.use)
    blocks: Any = SimpleNamespace(is_cuda=device == "cuda", device=torch.device(device), nbytes=1)
    sent: DirectBlocks = carrier.send(blocks)
    assert manager.stream == waited
    assert carrier.receive(sent, timeout_s=1.0) == taken  # type: ignore[comparison-overlap]
