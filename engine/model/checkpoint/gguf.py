"""`python -m engine.model.checkpoint.gguf FILE FOLDER [DTYPE]`: converts a GGUF file to a folder that can be served.

transformers reads the file: tokenizer, chat template, and blocks, which are dequantized exactly in float32 and rounded
to the served dtype. A file with tensors that transformers does not read is refused, since they would be dropped
silently.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.config import ModelDtype
from engine.model.checkpoint.completeness import refuse_incomplete
from engine.model.checkpoint.dtype import resolve_dtype
from engine.model.checkpoint.gguf_header import read_gguf_header
from engine.model.checkpoint.gguf_metadata import GgufHeader
from engine.model.checkpoint.progress import READING_ERRORS
from protos.errors import ConfigError, ServingError

logger = logging.getLogger(__name__)

_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")  # one per family
_ROPE_DIVISORS = "rope_freqs.weight"
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def convert_gguf(file: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the model of `file` into `folder`: safetensors in `dtype`, configuration, tokenizer and chat template.

    Raises:
        ConfigError: the file is damaged or not GGUF, or transformers does not read all of its model.
    """
    header = read_gguf_header(file)
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with _understood(header):
        config = AutoConfig.from_pretrained(**source)
        with torch.device("meta"):  # takes no memory; if tensors are missing, `_read` names one
            _check_size(header, AutoModelForCausalLM.from_config(config), at_most=2)
        _restore_numbers(header, config)
        _restore_rope(header, config)
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = _read(header, source, config, dtype)
    config.dtype = dtype
    with torch.device("meta"):  # a new model, since `save_pretrained` refuses the dequantized one
        plain: Any = type(model)._from_config(config, dtype=dtype)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    _restore_ends(header, plain.generation_config)
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _understood(header: GgufHeader) -> Iterator[None]:
    """Turn what transformers raises for an unknown file into a ConfigError."""
    try:
        yield
    except READING_ERRORS as error:
        raise ConfigError(
            f"transformers does not read {str(header.file)!r} (architecture {header.architecture!r}): "
            f"{type(error).__name__}: {error}"
        ) from error


def _read(header: GgufHeader, source: dict[str, Any], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        **source,
        config=config,
        dtype=dtype,
        ignore_mismatched_sizes=True,  # refused by name later
        output_loading_info=True,
    )
    model, info = loaded
    refuse_incomplete(str(header.file), info, model.state_dict())
    _check_size(header, model, at_most=1)
    return model


def _check_size(header: GgufHeader, model: nn.Module, at_most: int) -> None:
    """Refuse a model with fewer numbers than the file holds, or more than `at_most` times as many."""
    wanted = sum(parameter.numel() for parameter in model.parameters())
    held = sum(tensor.num_numbers for tensor in header.tensors if tensor.name != _ROPE_DIVISORS)
    if not held <= wanted <= at_most * held:
        raise ConfigError(
            f"{str(header.file)!r} (architecture {header.architecture!r}) holds {held:,} numbers, but transformers' "
            f"model has {wanted:,}: its metadata and tensors disagree, or a part of it would be left out. "
            "Convert the original checkpoint instead"
        )


def _restore_numbers(header: GgufHeader, config: PreTrainedConfig) -> None:
    """Set the numbers that transformers reads from another key, or not at all, for some families."""
    for name in _EPSILONS:
        if hasattr(config, name):
            setattr(config, name, header.epsilon)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    of_layers = {
        "rope.freq_base": rope.get("full_attention", rope),
        "rope.freq_base_swa": rope.get("sliding_attention", {}),
    }
    for key, parameters in of_layers.items():
        if parameters and (theta := header.number(key)) is not None:
            parameters["rope_theta"] = theta
    if "partial_rotary_factor" in rope and (rotated := header.number("rope.dimension_count")) is not None:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rope["partial_rotary_factor"] = rotated / head_dim


def _restore_ends(header: GgufHeader, config: GenerationConfig) -> None:
    """Add the tokens that end a turn to those that end a text, as llama.cpp does."""
    stated = config.eos_token_id
    ends = [stated] if isinstance(stated, int) else list(stated or ())
    turn_ends = {token_id for role in ("eot", "eom") if (token_id := header.token_id(role)) is not None}
    if added := sorted(turn_ends - set(ends)):
        config.eos_token_id = [*ends, *added]


def _restore_rope(header: GgufHeader, config: PreTrainedConfig) -> None:
    """Set the rotary scaling that the file has and transformers does not read.

    llama.cpp writes Llama 3's scaling as a divisor per frequency; the largest divisor is the scaling factor.
    """
    rope: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    scaling = _scaling(header) if rope.get("rope_type", "default") == "default" else None
    if scaling is None and _ROPE_DIVISORS in {tensor.name for tensor in header.tensors}:
        divisors = _rope_divisors(header.file)
        scaled = {"rope_type": "llama3", "factor": float(divisors.max()), **_LLAMA_3}
        config.rope_parameters = {**rope, **scaled}
        expected = _scaled_divisors(config)
        if expected.shape != divisors.shape or not torch.allclose(expected, divisors, rtol=1e-3):
            scaling = f"divisors {divisors.tolist()}"
    if scaling is not None:
        raise ConfigError(
            f"{str(header.file)!r} scales its rotary frequencies in an unsupported way ({scaling}); convert the "
            "original checkpoint instead"
        )


def _scaling(header: GgufHeader) -> str | None:
    """Return the name of the scaling of all rotary frequencies; it is linear if only a factor is stated."""
    kind = header.value("rope.scaling.type")
    factor = header.value("rope.scaling.factor") or header.value("rope.scale_linear")
    if kind is None and factor not in (None, 0, 1):
        return f"linear, {factor}"
    return None if kind in (None, "", "none") else str(kind)


def _rope_divisors(file: Path) -> Tensor:
    (tensor,) = (each for each in GGUFReader(file).tensors if each.name == _ROPE_DIVISORS)
    return torch.tensor(tensor.data, dtype=torch.float32)


def _scaled_divisors(config: PreTrainedConfig) -> Tensor:
    """Return Llama 3's divisor of each rotary frequency, [D / 2] float32."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))
    return plain / scaled  # type: ignore[no-any-return]


def main() -> int:
    """Convert a file, or print the error; return the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("dtype", nargs="?", choices=list(ModelDtype), default=ModelDtype.AUTO)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        convert_gguf(options.file, options.folder, resolve_dtype(options.dtype, device))
    except ServingError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
