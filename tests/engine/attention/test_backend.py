"""The attention backend of each device, and the error if it cannot have the configured one."""

from __future__ import annotations

import logging

import pytest
import torch

from engine.attention import backend as attention_backend
from engine.attention.backend import check_kv_kind, choose_attention
from engine.attention.batch_invariant import BatchInvariantAttention
from engine.attention.native import NativeAttention
from engine.attention.torch_attention import TorchAttention
from engine.batch.span import Span
from engine.config import KVDtype
from engine.kv_cache.pool import KVCache, LayerShape
from engine.native.library import kernels_for
from protos.errors import ConfigError
from tests.engine.fixtures.native_kernels import needs_float_kernels

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_a_processor_without_our_kernels_gets_torch_and_the_log_says_so(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_backend, "native_library", lambda _: None)
    with caplog.at_level(logging.INFO):
        assert choose_attention(name, CPU) is TorchAttention
    assert f"attention on cpu: torch (configured: {name}" in caplog.text
    assert choose_attention(name, CPU, is_deterministic=True) is BatchInvariantAttention


def test_a_processor_without_our_kernels_refuses_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_backend, "native_library", lambda _: None)
    with pytest.raises(ConfigError, match=r"there is no native kernel for it here.*set it to auto or torch"):
        choose_attention("native", CPU)


@needs_float_kernels
def test_a_processor_with_our_kernels_gets_them_for_the_pools_that_they_read(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        plan_attention = choose_attention("auto", CPU)
    has_bfloat16 = kernels_for(torch.bfloat16) is not None
    name = "auto" if has_bfloat16 else "auto; for float32"
    assert f"attention on cpu: native kernel (configured: {name})" in caplog.text
    assert choose_attention("torch", CPU) is TorchAttention
    span = Span([0], 0, [0], 1)
    for dtype, dim, kind in (
        (torch.bfloat16, 64, NativeAttention if has_bfloat16 else TorchAttention),
        (torch.float32, 576, NativeAttention),
        (torch.float16, 64, TorchAttention),
        (torch.float32, 577, TorchAttention),
    ):
        cache = KVCache([LayerShape(1, dim, 8)], 1, 16, dtype=dtype, device=CPU)
        assert isinstance(plan_attention([span], cache, slice(0, 1)), kind)
        if kind is TorchAttention:
            with pytest.raises(ConfigError, match=r"attention is 'native', which reads .*set it to auto or torch"):
                choose_attention("native", CPU)([span], cache, slice(0, 1))


@needs_float_kernels
def test_a_refused_pool_names_the_attention_that_does_not_read_it() -> None:
    with pytest.raises(ConfigError, match=r"runs on cpu with native attention; set it to int8"):
        check_kv_kind(KVDtype.FP8, choose_attention("auto", CPU), CPU)


def test_a_processor_without_interpreter_refuses_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="runs on cpu, which is no GPU; set it to auto or torch"):
        choose_attention("triton", CPU)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_the_triton_kernel() -> None:
    assert choose_attention("auto", torch.device("cuda")) is not TorchAttention
