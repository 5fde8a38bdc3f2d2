"""Choice of the attention on a device: plain torch anywhere, our kernels on GPUs and on processors with AVX2."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec

import torch

from engine.attention.base import PlanAttention
from engine.attention.batch_invariant import BatchInvariantAttention
from engine.attention.native import NativeAttention, native_or_batch_invariant, native_or_torch
from engine.attention.torch_attention import TorchAttention
from engine.config import AttentionKind, KVDtype
from engine.native.library import Instructions, kernels_for, native_library
from protos.errors import ConfigError

logger = logging.getLogger(__name__)

_MIN_CAPABILITY = (8, 0)  # matrix units for bfloat16, and copies to shared memory that do not wait
_MIN_FLOAT8_CAPABILITY = (8, 9)
_NATIVE = (NativeAttention, native_or_torch, native_or_batch_invariant)


def choose_attention(name: str, device: torch.device, *, is_deterministic: bool = False) -> PlanAttention:
    """Return the attention of a model on `device`; `name` is an AttentionKind.

    Raises:
        ConfigError: `device` cannot run it.
    """
    kind = AttentionKind(name)
    if kind is AttentionKind.NATIVE or (kind is AttentionKind.AUTO and _obstacle_to_native(device) is None):
        return _choose_native(kind, device, is_deterministic=is_deterministic)
    obstacle = _obstacle_to_triton(device)
    if is_deterministic:
        is_on_gpu = kind is AttentionKind.TRITON or (kind is AttentionKind.AUTO and device.type == "cuda")
        return _batch_invariant_triton() if is_on_gpu and not obstacle else BatchInvariantAttention
    if kind is AttentionKind.TRITON and obstacle:
        raise ConfigError(f"attention is 'triton', but {obstacle}; set it to auto or torch")
    if kind is AttentionKind.TORCH or obstacle or (kind is AttentionKind.AUTO and device.type != "cuda"):
        logger.info("attention on %s: torch (configured: %s%s)", device, kind, f"; {obstacle}" if obstacle else "")
        return TorchAttention
    logger.info("attention on %s: Triton kernel (configured: %s)", device, kind)
    # Not at the top: processes without a GPU may have no Triton, and need none.
    from engine.attention.triton_attention import TritonAttention

    return TritonAttention


def is_triton(plan_attention: PlanAttention) -> bool:
    """True for our kernel on GPUs."""
    return plan_attention not in (TorchAttention, BatchInvariantAttention, *_NATIVE)


def is_batch_invariant(plan_attention: PlanAttention) -> bool:
    """True for our GPU kernel in its batch-invariant form."""
    return is_triton(plan_attention) and plan_attention is _batch_invariant_triton()


def _batch_invariant_triton() -> PlanAttention:
    from engine.attention.triton_attention import batch_invariant_triton

    return batch_invariant_triton


def check_kv_kind(kind: KVDtype, plan_attention: PlanAttention, device: torch.device) -> None:
    """Check that `plan_attention` on `device` reads a pool of `kind`: int8 is for processors, fp8 for our kernel.

    Raises:
        ConfigError: it does not.
    """
    on_gpu = is_triton(plan_attention)
    name = "Triton" if on_gpu else "native" if plan_attention in _NATIVE else "torch"
    here = f"the model runs on {device} with {name} attention"
    if kind is KVDtype.INT8 and (on_gpu or device.type != "cpu"):
        raise ConfigError(
            f"cache.dtype is 'int8', which the attention on processors reads, and {here}; set it to auto, or to "
            "fp8 where the Triton kernel runs on a GPU of compute capability 8.9 or later"
        )
    if kind is KVDtype.FP8 and not on_gpu:
        remedy = "int8" if device.type == "cpu" else "auto, or target.attention to auto"
        raise ConfigError(
            f"cache.dtype is 'fp8', which the Triton kernel on GPUs reads, and {here}; set it to {remedy}"
        )
    if kind is KVDtype.FP8 and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _MIN_FLOAT8_CAPABILITY:
            raise ConfigError(
                f"cache.dtype is 'fp8', which needs compute capability 8.9, and {torch.cuda.get_device_name(device)} "
                f"has {capability[0]}.{capability[1]}; set it to auto"
            )


def _choose_native(kind: AttentionKind, device: torch.device, *, is_deterministic: bool) -> PlanAttention:
    if obstacle := _obstacle_to_native(device):
        raise ConfigError(f"attention is 'native', but {obstacle}; set it to auto or torch")
    has_all = kernels_for(torch.bfloat16) is not None
    logger.info("attention on %s: native kernel (configured: %s%s)", device, kind, "" if has_all else "; for float32")
    if kind is AttentionKind.NATIVE:
        return NativeAttention
    return native_or_batch_invariant if is_deterministic else native_or_torch


def _obstacle_to_native(device: torch.device) -> str | None:
    """Return the reason against our kernel for processors on `device`; None if it can run."""
    if device.type != "cpu":
        return f"the model runs on {device}, which is no processor"
    has_kernel = native_library(Instructions.AVX2) is not None
    return None if has_kernel else "there is no native kernel for it here; the log has the reason"


def _obstacle_to_triton(device: torch.device) -> str | None:
    """Return the reason against our kernel for GPUs on `device`; None if it can run."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type != "cuda":
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if is_interpreted else f"the model runs on {device}, which is no GPU"
    if torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    return None
