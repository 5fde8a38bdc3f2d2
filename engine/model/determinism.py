"""Conditions of `deterministic: true`: the bits of a row's logits depend only on the text before it.

Then speculation, batches, chunks and prefix hits change no token in any dtype.
On processors `engine.model.linear.batch_invariant_linear` and `engine.attention.native` (or
`engine.attention.batch_invariant`) guarantee this, on GPUs our Triton kernels of products, norms and attention. This
module refuses models without such kernels, and checks the whole model at every start.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from engine.batch.span import Span
from engine.model.attention_probe import LayerRecord

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_LENGTH = 24  # tokens of the checked text

Forward = Callable[[list[Span]], Tensor]  # logits of the spans' rows


def obstacle(
    model: PreTrainedModel,
    records: Seq[LayerRecord],
    *,
    has_own_kernel: bool,
    has_own_decoder: bool,
    has_own_experts: bool,
) -> str | None:
    """Return why a model cannot be deterministic with our own attention kernel or torch's; None if it can."""
    if model.device.type != "cpu" and not has_own_kernel:
        return f"it runs on {model.device} without our Triton kernel for attention (target.attention)"
    if model.device.type != "cpu" and not has_own_decoder:
        return f"on {model.device} its norms are transformers', which sum in an order that depends on the rows"
    if has_experts(model) and not has_own_experts:
        return "how many rows an expert gets depends on the whole pass, and our kernels cannot multiply by its experts"
    for record in [] if has_own_kernel else records:
        if record.options.softcap is not None or record.options.sinks is not None:
            return f"layer {record.layer} has a softcap or attention sinks: torch has no kernel in fixed units for them"
        if record.shape.key_dim != record.shape.value_dim:
            return (
                f"keys and values of layer {record.layer} differ in size: torch has no kernel in fixed units for them"
            )
    return None


def has_experts(model: PreTrainedModel) -> bool:
    """True for a mixture of experts: an expert's rows depend on the whole pass."""
    return config_has_experts(model.config)


def config_has_experts(config: PreTrainedConfig) -> bool:
    """True for the configuration of a mixture of experts."""
    text = config.get_text_config()
    if "mlp" in (kinds := getattr(text, "layers_block_type", None) or ()):  # Nemotron-H, which may have no experts
        return "moe" in kinds
    return any(getattr(text, key, None) for key in _EXPERT_KEYS)


def first_difference(forward: Forward, vocab_size: int) -> str | None:
    """Name the first kind of pass whose bits differ from a prefill's; None if all are equal.

    `forward` has a pool of three blocks of at least `_LENGTH` slots.
    """
    text = [(5 + 11 * position) % vocab_size for position in range(_LENGTH)]
    other = Span([(2 + 3 * position) % vocab_size for position in range(11)], 0, [2], 0)
    expected = forward([_span(text, 0, _LENGTH)])
    passes = {
        "chunks": [[_span(text, 0, 10)], [_span(text, 10, _LENGTH)]],
        "a verification next to another sequence": [[_span(text, 0, 17)], [other, _span(text, 17, 22)]],
        "single tokens": [[_span(text, at, at + 1)] for at in range(_LENGTH - 4, _LENGTH)],
    }
    for name, steps in passes.items():
        for spans in steps:
            span = spans[-1]
            if not torch.equal(forward(spans), expected[span.start : span.end]):
                return name
    return None


def _span(text: list[int], start: int, end: int) -> Span:
    return Span(text[start:end], start, [0], end - start)
