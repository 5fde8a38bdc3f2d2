"""The way of KV blocks: the configured one or an error, and for auto the best one, with the reason in the log."""

import logging

import pytest
import torch

from actors.kv_transport import NixlCarrier, choose_carrier
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
