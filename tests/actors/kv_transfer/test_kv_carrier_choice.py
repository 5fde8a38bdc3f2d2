"""Which way KV blocks take: what was asked for, against what this process has, and never anything else in silence."""

import logging

import pytest
import torch

from actors.kv_transfer.kv_carrier_choice import choose_carrier
from actors.kv_transfer.nixl_carrier import NixlCarrier
from protos.errors import ConfigError


def has(monkeypatch: pytest.MonkeyPatch, *, gpu: bool, nixl: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(NixlCarrier, "problem", staticmethod(lambda: None if nixl else "ModuleNotFoundError: nixl"))


@pytest.mark.parametrize(
    ("wish", "gpu", "nixl", "is_direct", "reason"),
    [
        ("auto", False, True, False, "there is no GPU"),
        ("auto", True, True, True, "GPU to GPU"),
        ("auto", True, False, False, "ModuleNotFoundError: nixl"),
        ("object_store", True, True, False, "as configured"),
        ("nixl", False, True, True, "main memory"),
    ],
)
def test_the_way_and_its_reason(
    wish: str,
    gpu: bool,
    nixl: bool,
    is_direct: bool,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    has(monkeypatch, gpu=gpu, nixl=nixl)
    with caplog.at_level(logging.INFO):
        assert isinstance(choose_carrier(wish), NixlCarrier) == is_direct
    assert reason in caplog.text


def test_what_cannot_be_had_is_refused_with_the_reason_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, gpu=True, nixl=False)
    with pytest.raises(ConfigError, match=r"'nixl', which this process cannot use \(ModuleNotFoundError: nixl\)"):
        choose_carrier("nixl")
