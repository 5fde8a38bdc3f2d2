"""Checks a model by its configuration and the headers of its files, without loading weights.

A deployment that replaces a serving one is checked like this first. Only the start itself finds non-finite numbers
and a wrong forward.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.attention.backend import check_kv_kind, choose_attention
from engine.attention.torch_attention import ATTENTION_NAME, attending
from engine.config import CacheConfig, HeadConfig, HeadKind, KVDtype, ModelConfig
from engine.model.attention_probe import RecordingPass, check_layers, refusal, state_keywords, understood
from engine.model.checkpoint.completeness import READING_ERRORS, refuse_incomplete
from engine.model.checkpoint.dtype import resolve_dtype
from engine.model.checkpoint.end_tokens import find_end_tokens
from engine.model.checkpoint.hub import cached_folder
from engine.model.checkpoint.scheme import SECTIONS, scheme_of
from engine.model.decoders.fused_decoder import FusedDecoder
from engine.model.decoders.latent import check_latents, computes_latents, latent_note
from engine.model.draft_heads.loader import load_head
from engine.model.draft_heads.self_draft import check_self
from engine.model.generation_config import length_limit, unknown_ends, unread_warning
from engine.model.loader import instead_of_bar, load_config
from engine.model.runner.served_weights import usable_quantization
from engine.model.tensor_parallel import check_divisible, shard_plan
from engine.recurrent.state_pass import RecordingStates
from engine.recurrent.stock_functions import connect, keeps_states
from protos.errors import ConfigError

logger = logging.getLogger(__name__)

_META = torch.device("meta")


def check_outline(
    model: ModelConfig,
    cache: CacheConfig,
    max_model_len: int | None = None,
    head: HeadConfig | None = None,
    *,
    is_on_gpu: bool = False,
) -> tuple[list[str], bool]:
    """Check as far as headers allow that a `ModelRunner` with these arguments can be made.

    A Hub model that is not fetched yet is checked by its configuration alone. GPU kernels are not checked, since no
    process has a GPU before the pair is placed.

    Returns:
        Notes for the operator: the longest text, lengths that nothing reads, the end tokens, and whether the cache
        keeps latents; and True if the model has recurrent layers, False for a Hub model that is not fetched yet.

    Raises:
        ConfigError: it cannot be made.
    """
    # What the configuration alone decides.
    device = torch.device("cuda" if is_on_gpu else "cpu")
    config = load_config(model.path)
    resolve_dtype(model.dtype, device)
    notes = _notes(model, config, length_limit(config, max_model_len, max_model_len or 0))
    is_described, num_ranks = FusedDecoder.fits_config(config), model.tensor_parallel_size
    if note := latent_note(config, is_described=is_described, num_ranks=num_ranks, is_on_gpu=is_on_gpu):
        notes.append(note)
    usable_quantization(model, device)
    if not is_on_gpu:
        attention = choose_attention(model.attention, device, is_deterministic=model.deterministic)
        check_kv_kind(KVDtype(cache.dtype), attention, device)
        if num_ranks == 1 and is_described and computes_latents(config):
            check_latents(KVDtype(cache.dtype), attention, config.model_type)
    if num_ranks > 1:
        check_divisible(config, num_ranks)
    # What needs the modules, built without weights.
    outline = _outline(model.path, config)
    if outline is None:
        return notes, False
    if num_ranks > 1:
        shard_plan(outline, num_ranks)
    if head is not None and head.kind is HeadKind.SELF:
        check_self(head, outline, model.quantization, device)
    elif head is not None and _is_small(head):
        with _left_to_the_start(f"the head of {model.path!r}"):
            load_head(head, outline, _META)
    with _left_to_the_start(f"the attention of {model.path!r}"):
        _check_attention(outline.to(torch.bfloat16))  # the dtype that products of experts take on the meta device
    return notes, keeps_states(outline)


def _notes(model: ModelConfig, config: PreTrainedConfig, limit: int) -> list[str]:
    text = config.get_text_config()
    notes = [f"the longest text has {limit} tokens"] if limit else []
    if warning := unread_warning(config):
        notes.append(warning)
    folder, assumed = _folder(model.path), getattr(text, "eos_token_id", None)
    if folder is not None:
        ends, unknown = find_end_tokens(folder, text.vocab_size, assumed, model.chat_template)
        notes += [f"end tokens are {list(ends)}"] if ends else []
        notes += [unknown_ends(unknown, text.vocab_size)] if unknown else []
    return notes


def _folder(path: str) -> Path | None:
    """Return the folder of the model's files; None for a Hub model that is not here yet."""
    local = Path(path).expanduser()
    return local if local.is_dir() else cached_folder(path)


def _check_attention(model: PreTrainedModel) -> None:
    """Raise ConfigError unless each layer of an outline calls our attention once; windows need numbers."""
    recording, states = RecordingPass(), RecordingStates()
    positions = torch.arange(2, device=_META)[None]
    with understood(model):
        model.set_attn_implementation(ATTENTION_NAME)
        recurrent = connect(model)
        config = model.config.get_text_config()
        if config._attn_implementation != ATTENTION_NAME:
            raise refusal(model, "its layers have their own attention")
        with attending(recording):
            model(
                input_ids=torch.zeros_like(positions),
                position_ids=positions,
                use_cache=False,
                **state_keywords(states if recurrent else None),
            )
    layers = sorted(record.layer for record in recording.records)
    check_layers(model, layers, recurrent if states.are_complete(recurrent) else [])


def _outline(path: str, config: PreTrainedConfig) -> PreTrainedModel | None:
    """Return the model with shapes alone; None for one that is not here yet. Raises ConfigError if files are missing.

    A quantized checkpoint's files hold other tensors than the model; `check_models` has checked them.
    """
    folder = _folder(path)
    if folder is None:
        return None
    is_quantized = scheme_of(config.to_dict(), path) is not None
    for section in SECTIONS if is_quantized else ():
        if hasattr(config, section):
            delattr(config, section)
    try:
        # Shapes from the configuration, on the meta device.
        with _META:
            model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
        if is_quantized:
            return model.eval()
        # Compare them with the files' headers, without loading data.
        with instead_of_bar():
            loaded: Any = type(model).from_pretrained(
                folder,
                config=model.config,
                device_map="meta",
                attn_implementation="eager",
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (*READING_ERRORS, SafetensorError) as error:
        raise ConfigError(
            f"{path!r} (model type {config.model_type}) cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    model, info = loaded
    refuse_incomplete(path, info, model.state_dict())
    return model.eval()


def _is_small(head: HeadConfig) -> bool:
    if head.path is None:
        return True
    folder = Path(head.path).expanduser()
    # A larger head is checked at the start.
    return folder.is_dir() and sum(file.stat().st_size for file in folder.iterdir()) <= 2 << 30


@contextmanager
def _left_to_the_start(what: str) -> Iterator[None]:
    """Run a check; leave what needs numbers, which tensors on the meta device lack, to the start."""
    try:
        yield
    except (ConfigError, RuntimeError) as error:
        cause = error.__cause__ if isinstance(error, ConfigError) else error
        if not isinstance(cause, NotImplementedError) and not (
            isinstance(cause, RuntimeError) and "meta" in str(cause)
        ):
            raise
        logger.info("%s is checked at the start, since the check needs numbers: %s", what, cause)
