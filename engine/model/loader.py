"""Loading of a causal language model from a folder or the Hub, or a refusal with its reason.

The model is transformers' own, with its stock attention; `engine.model.paged_model` turns it into a paged one.
"""

from __future__ import annotations

import logging
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from engine.config import ModelConfig, ModelDtype
from protos.errors import ConfigError

logger = logging.getLogger(__name__)

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ModelDtype if name is not ModelDtype.AUTO}
_NUM_SAMPLED_PAGES = 64
_PAGE_BYTES = 4096


def load_model(config: ModelConfig, device: torch.device | None = None) -> PreTrainedModel:
    """Load weights (safetensors only) onto `device`, the configured one if None.

    Raises:
        ConfigError: something is missing or unfit.
    """
    dtype = resolve_dtype(config.dtype, resolve_device(config.device))
    device = device or resolve_device(config.device)
    model_config = load_config(config.path)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            config.path,
            config=model_config,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are refused by name below
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        raise ConfigError(
            f"the weights of {config.path!r} (model type {model_config.model_type}) cannot be loaded: {error}"
        ) from error
    model, info = loaded
    if info["missing_keys"]:
        names = sorted(info["missing_keys"])
        raise ConfigError(
            f"the weights of {config.path!r} are incomplete: {len(names)} tensors are missing, {names[0]!r} among them"
        )
    if info["mismatched_keys"]:
        name, found, wanted = sorted(info["mismatched_keys"])[0]
        raise ConfigError(
            f"the weights of {config.path!r} do not fit its config.json: {name!r} is {list(found)} in the files, and "
            f"{list(wanted)} by the configuration ({len(info['mismatched_keys'])} tensors differ)"
        )
    logger.info("loaded %s (%s) as %s on %s", config.path, model_config.model_type, dtype, device)
    return cast(PreTrainedModel, model.to(device).eval().requires_grad_(False))


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU that this process sees first, or the processor."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}; it must be auto, cpu or cuda[:n]") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r} but torch sees no CUDA device; use cpu or auto")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device multiplies in it (CUDA, AVX512-BF16, AMX) and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or _has_bfloat16_units() else torch.float32
    if name not in _DTYPES:
        raise ConfigError(f"dtype is {name!r}; it must be auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _has_bfloat16_units() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def load_config(path: str) -> PreTrainedConfig:
    """The model's configuration, without its weights; raises ConfigError where there is none."""
    if _looks_local(path) and not Path(path).expanduser().is_dir():
        raise ConfigError(f"model folder {path!r} does not exist; give a local folder or a Hub id such as 'org/name'")
    try:
        return cast(PreTrainedConfig, AutoConfig.from_pretrained(path, trust_remote_code=False))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path!r} holds no model configuration that transformers knows: {error}") from error


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).is_dir()


def model_version(path: str, quantization: str = "none") -> str:
    """A digest that tells any two sets of weights apart and is the same on every machine that holds the same files.

    It covers the configuration, and of each weight file its name, its size and evenly spaced pages, so that a fine-tune
    with the same shapes differs, and a 100 GB model is hashed in milliseconds.
    """
    folder = _folder_of(path)
    digest = blake2b((folder / "config.json").read_bytes(), digest_size=16)
    if quantization != "none":
        digest.update(f"{quantization} in groups of 32".encode())
    for file in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")):
        num_bytes = file.stat().st_size
        digest.update(f"{file.name}\0{num_bytes}\0".encode())
        with file.open("rb") as stream:
            for page in range(_NUM_SAMPLED_PAGES):
                stream.seek(page * num_bytes // _NUM_SAMPLED_PAGES)
                digest.update(stream.read(_PAGE_BYTES))
    return digest.hexdigest()


def tokenizer_file(path: str) -> Path | None:
    """The model's tokenizer.json, if it has one."""
    file = _folder_of(path) / "tokenizer.json"
    return file if file.is_file() else None


def _folder_of(path: str) -> Path:
    """The folder of the model's files; those of a Hub id are already in its cache."""
    if Path(path).expanduser().is_dir():
        return Path(path).expanduser()
    config_file = cached_file(path, "config.json")
    assert config_file is not None, "the model was loaded from this cache"
    return Path(config_file).parent
