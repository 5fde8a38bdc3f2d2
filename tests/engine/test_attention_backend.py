"""Which attention a device gets, and what is said where it cannot have the configured one."""

from __future__ import annotations

import logging

import pytest
import torch

from engine.attention import TorchAttention
from engine.attention_backend import choose_attention
from protos.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_a_processor_gets_torch_and_the_log_says_so(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_attention(name, CPU) is TorchAttention
    assert f"attention on cpu: torch (configured: {name}" in caplog.text


def test_a_processor_without_interpreter_refuses_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="runs on cpu, which is no GPU; set it to auto or torch"):
        choose_attention("triton", CPU)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="attention is 'flash'; it must be auto, torch, triton"):
        choose_attention("flash", CPU)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_the_triton_kernel() -> None:
    assert choose_attention("auto", torch.device("cuda")) is not TorchAttention
