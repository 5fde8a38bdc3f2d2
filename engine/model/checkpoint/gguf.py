"""`python -m engine.model.checkpoint.gguf FILE FOLDER [DTYPE]`: a GGUF file as a folder that is served.

transformers reads the file: its blocks as the numbers that they stand for, exact in float32, then rounded to the dtype
that is served; its tokenizer and chat template. A file that holds more than transformers reads is refused, since the
rest would be left out in silence.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.config import ModelDtype
from engine.model.checkpoint.completeness import refuse_incomplete
from engine.model.checkpoint.dtype import resolve_dtype
from engine.model.checkpoint.gguf_header import GgufHeader, read_gguf_header
from protos.errors import ConfigError, ServingError

logger = logging.getLogger(__name__)

_ROPE_DIVISORS = "rope_freqs.weight"
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def convert_gguf(file: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the model of `file` into `folder`: safetensors in `dtype`, configuration, tokenizer and chat template.

    Raises:
        ConfigError: the file is no whole GGUF file, or transformers does not read all of its model.
    """
    header = read_gguf_header(file)
    model = _read(file, header, dtype)
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights that are written have none
    config.dtype = dtype
    _restore_rope(file, header, config)
    with torch.device("meta"):  # a new model: `save_pretrained` refuses the dequantized one
        plain: Any = type(model)._from_config(config, dtype=dtype)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(folder)


def _read(file: Path, header: GgufHeader, dtype: torch.dtype) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, IndexError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"{str(file)!r} (architecture {header.architecture!r}) is not read by transformers: {error}"
        ) from error
    model, info = loaded
    refuse_incomplete(str(file), info)
    read = sum(parameter.numel() for parameter in model.parameters())
    held = sum(tensor.num_numbers for tensor in header.tensors if tensor.name != _ROPE_DIVISORS)
    if read != held:
        raise ConfigError(
            f"{str(file)!r} (architecture {header.architecture!r}) holds {held:,} numbers, and transformers' model has "
            f"{read:,}: a part of it would be left out. Convert the original checkpoint instead"
        )
    return model


def _restore_rope(file: Path, header: GgufHeader, config: PreTrainedConfig) -> None:
    """Give the configuration the scaling of rotary frequencies that the file has and transformers does not read.

    llama.cpp writes Llama 3's as a divisor of each frequency, of which the greatest is the scaling's factor.
    """
    rope: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    scaling = header.values.get(f"{header.architecture}.rope.scaling.type")
    if _ROPE_DIVISORS in {tensor.name for tensor in header.tensors}:
        divisors = _rope_divisors(file)
        scaled = {"rope_type": "llama3", "factor": float(divisors.max()), **_LLAMA_3}
        config.rope_parameters = {**rope, **scaled}
        expected = _scaled_divisors(config)
        if expected.shape == divisors.shape and torch.allclose(expected, divisors, rtol=1e-3):
            return
        scaling = f"of the divisors {divisors.tolist()}"
    elif scaling in (None, "", "none") or rope.get("rope_type", "default") != "default":
        return
    raise ConfigError(
        f"{str(file)!r} scales its rotary frequencies ({scaling}), which is not read; convert the original checkpoint "
        "instead"
    )


def _rope_divisors(file: Path) -> Tensor:
    (tensor,) = (each for each in GGUFReader(file).tensors if each.name == _ROPE_DIVISORS)
    return torch.tensor(tensor.data, dtype=torch.float32)


def _scaled_divisors(config: PreTrainedConfig) -> Tensor:
    """Return what a configuration of Llama 3's scaling divides each frequency by, [D / 2] float32."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))
    return plain / scaled  # type: ignore[no-any-return]


def main() -> int:
    """Convert, or write to stdout why not; return the exit status."""
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
