"""`python -m engine.model.checkpoint.gguf FILE FOLDER [DTYPE]`: converts a GGUF file to a folder that can be served.

transformers reads the tokenizer and the chat template, and names and orders the weights. Their blocks are kept, or
with DTYPE dequantized exactly in float32 and rounded. A file with tensors that transformers does not read is refused,
since they would be dropped silently.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
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
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.config import ModelDtype
from engine.model.checkpoint.completeness import READING_ERRORS, refuse_incomplete
from engine.model.checkpoint.dequantize import gguf_numbers
from engine.model.checkpoint.dtype import resolve_dtype
from engine.model.checkpoint.gguf_header import BLOCKS, GgufHeader, read_gguf_header
from engine.model.checkpoint.weight_files import SafetensorsWriter, write_index
from protos.errors import ConfigError, ServingError

logger = logging.getLogger(__name__)

_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")  # one per family
_EXPERT_SIZE = "moe_intermediate_size"
_ROPE_DIVISORS = "rope_freqs.weight"
_SAFETENSORS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"}
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def convert_gguf(file: Path, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write the model of `file` into `folder`: safetensors, configuration, tokenizer and chat template.

    Args:
        file: the GGUF file.
        folder: created if it does not exist.
        dtype: the numbers are rounded to it; None keeps blocks as they are, for `engine.model.checkpoint.dequantize`.

    Raises:
        ConfigError: the file is damaged or not GGUF, or transformers does not read all of its model.
    """
    header = read_gguf_header(file)
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with _understood(header):
        # Restore the fields that transformers drops, and check that the file is complete.
        config = AutoConfig.from_pretrained(**source)
        _restore_numbers(header, config)
        with torch.device("meta"):  # takes no memory
            model = AutoModelForCausalLM.from_config(config)
        _check_size(header, model, at_most=2)
        _restore_rope(header, config)
        tokenizer = AutoTokenizer.from_pretrained(**source)
        folder.mkdir(parents=True, exist_ok=True)
        written = _write_weights(header, model, folder, dtype)
    _refuse_incomplete(header, model, written)
    _check_size(header, model, at_most=1)
    # Describe the written weights, as a checkpoint of this format.
    config.dtype, config.architectures = dtype or torch.bfloat16, [type(model).__name__]
    if dtype is None:
        config.quantization_config = {"quant_method": "gguf"}
    _restore_ends(header, model.generation_config)
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_weights(
    header: GgufHeader, model: PreTrainedModel, folder: Path, dtype: torch.dtype | None
) -> dict[str, tuple[int, ...]]:
    """Write the weights one by one, in a file for each dtype; return their shapes by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    room = sum(len(name) + 200 for name in model.state_dict())  # 200 bytes for the rest of an entry
    writers: dict[str, SafetensorsWriter] = {}
    for name, kind, tensor in _weights(header, model):
        # Blocks keep their bytes, and the type becomes a part of the name; numbers are converted.
        if kind in BLOCKS and tensor.dtype is torch.uint8 and dtype is None:
            size, num_bytes = BLOCKS[kind]
            shapes[name] = (*tensor.shape[:-1], tensor.shape[-1] // num_bytes * size)
            name = f"{name}.{kind}"
        else:
            tensor = gguf_numbers(tensor.numpy(), kind) if tensor.dtype is torch.uint8 else tensor
            tensor = tensor.to(dtype or _narrowest(tensor, kind))
            shapes[name] = tuple(tensor.shape)
        own = _SAFETENSORS[tensor.dtype]
        if own not in writers:
            writers[own] = SafetensorsWriter(folder / f"model-{own}.safetensors", room)
        contents = tensor.contiguous().flatten().view(torch.uint8).numpy()
        writers[own].add(name, own, tensor.shape, contents.data)
    for writer in writers.values():
        writer.close()
    write_index(folder, [writer.file for writer in writers.values()])
    return shapes


def _weights(header: GgufHeader, model: PreTrainedModel) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the weights in transformers' names and order of rows, with their type: bytes of blocks where it has any."""
    values = load_gguf_checkpoint(header.file)["config"]
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=values)
    names = get_gguf_hf_weights_map(model, processor)
    missing = Counter(names.values())  # parts of a weight that are tensors of their own: gate and up of experts
    parts: dict[str, list[dict[str, Tensor]]] = {}

    def process(name: str, weights: Any, made: dict[str, Tensor]) -> dict[str, Tensor]:
        done = processor.process(weights, name, tensor_key_mapping=names, parsed_parameters={"tensors": made})
        if done.name in names:
            made[names[done.name]] = torch.from_numpy(np.require(done.weights, requirements=["C", "W"]))
        return made

    # A tensor becomes numbers, blocks of bytes, or both, if only a comparison shows whether its bytes are right.
    for tensor in GGUFReader(header.file).tensors:
        kind, whole = tensor.tensor_type.name, names.get(tensor.name.removesuffix(".weight"), "")
        numbers, blocks = parts.pop(whole, [{}, {}])
        is_kept = kind in BLOCKS and _is_kept(processor, tensor, names)
        if not is_kept or missing[whole] > 1 or numbers:
            process(tensor.name, gguf_numbers(tensor.data, kind).numpy(), numbers)
        if kind in BLOCKS:
            with suppress(ValueError, RuntimeError):  # another shape of bytes cannot be joined: its numbers can
                process(tensor.name, tensor.data, blocks)
        # Wait until all parts of a weight are there; the bytes are kept if they encode its numbers.
        missing[whole] -= 1
        if whole and missing[whole] > 0:
            parts[whole] = [numbers, blocks]
            continue
        for name in {**numbers, **blocks}:
            is_same = name in blocks and (is_kept or _are_equal(blocks[name], kind, numbers[name]))
            yield name, kind, blocks[name] if is_same else numbers[name]


def _is_kept(processor: TensorProcessor, tensor: Any, names: Mapping[str, str]) -> bool:
    """True if a tensor's numbers are taken as they are."""
    for weights in (tensor.data, gguf_numbers(tensor.data[:1], tensor.tensor_type.name).numpy()):
        done = processor.process(weights, tensor.name, tensor_key_mapping=names, parsed_parameters={"tensors": {}})
        if done.weights is not weights or done.name != tensor.name:
            return False
    return True


def _are_equal(blocks: Tensor, kind: str, numbers: Tensor) -> bool:
    size, num_bytes = BLOCKS[kind]
    if (*blocks.shape[:-1], blocks.shape[-1] // num_bytes * size) != tuple(numbers.shape):
        return False
    rows = zip(blocks.split(64), numbers.split(64), strict=True)
    return all(torch.equal(gguf_numbers(some.numpy(), kind), same) for some, same in rows)


def _narrowest(numbers: Tensor, kind: str) -> torch.dtype:
    """Return the dtype of the file's own numbers where that loses nothing."""
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    return dtype if torch.equal(numbers.to(dtype).float(), numbers) else torch.float32


def _refuse_incomplete(header: GgufHeader, model: PreTrainedModel, written: Mapping[str, tuple[int, ...]]) -> None:
    wanted = model.state_dict(keep_vars=True)
    found = {id(wanted[name]) for name in written if name in wanted}
    info = {
        "missing_keys": {name for name, tensor in wanted.items() if id(tensor) not in found},
        "mismatched_keys": {
            (name, shape, tuple(wanted[name].shape))
            for name, shape in written.items()
            if name in wanted and shape != tuple(wanted[name].shape)
        },
        "unexpected_keys": set(written) - set(wanted),
    }
    refuse_incomplete(str(header.file), info, wanted)


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
    if hasattr(config, _EXPERT_SIZE) and (size := header.number("expert_feed_forward_length")) is not None:
        setattr(config, _EXPERT_SIZE, int(size))
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
    parser.add_argument("dtype", nargs="?", choices=list(ModelDtype))
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = None if options.dtype is None else resolve_dtype(options.dtype, device)
    try:
        convert_gguf(options.file, options.folder, dtype)
    except ServingError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
