"""Loads a causal language model from a folder or the Hub, or refuses it with a reason.

The model is transformers' own, with its stock attention; `engine.model.paged_model` turns it into a paged one.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.utils.hub import cached_file
from transformers.utils.logging import set_tqdm_hook

from engine.config import ModelConfig, Quantization
from engine.model.checkpoint.completeness import READING_ERRORS, refuse_incomplete, refuse_not_finite_model
from engine.model.checkpoint.dequantize import FLOATS, unread_weights
from engine.model.checkpoint.dtype import resolve_dtype
from engine.model.checkpoint.hub import fetch_model
from engine.model.checkpoint.mimo import register_mimo
from engine.model.checkpoint.node_memory import check_memory
from engine.model.checkpoint.progress import ProgressReport
from engine.model.checkpoint.scheme import SECTIONS, Scheme, scheme_of
from engine.model.checkpoint.stored_weights import refuse_unscaled, stored_weights
from engine.model.checkpoint.unread_weight import UnreadWeight, replace_unread, storing_experts
from engine.model.checkpoint.weight_files import (
    INDEX,
    WHOLE,
    file_digest,
    refuse_unindexed,
    tensor_headers,
    weight_files,
)
from engine.model.gpu_memory import WEIGHTS_REMEDY, enough_memory
from engine.model.linear.packed_linear import plain_linears
from engine.model.linear.quantized_linear import reads_few_bits
from protos.errors import ConfigError

logger = logging.getLogger(__name__)

_LEAST_BYTES = {Quantization.INT8: 1.0, Quantization.INT4: 0.5}  # of a weight in memory
_NUMBERS = {"I64", "I32", "U8", "BOOL"}  # of buffers, which keep their dtype

register_mimo()
# Models of several media run on texts. The checks at the start refuse those whose texts need more.
for _names in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES):
    for _type, _class in _names.items():
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(_type, _class)
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["gemma3n"] = "Gemma3nForCausalLM"  # the rest needs the library timm


def load_model(
    config: ModelConfig,
    device: torch.device | None = None,
    *,
    keeps_dtype: Callable[[PreTrainedConfig], bool] | None = None,
    is_checked: bool = False,
) -> PreTrainedModel:
    """Load weights (safetensors only) onto `device`, or the configured device if None; a Hub model is fetched first.

    Where `keeps_dtype` is true for the configuration, a processor's weights have the files' dtype: they are views of
    the files, and packing reads them. With `is_checked` the weights are known to be finite, and are not read.

    Raises:
        ConfigError: a file is missing or unsuitable.
    """
    folder = fetched_folder(config.path)
    dtype = resolve_dtype(config.dtype, resolve_device(config.device))
    device = device or resolve_device(config.device)
    model_config = load_config(config.path)
    scheme = scheme_of(model_config.to_dict(), config.path)
    keeps = device.type == "cpu" and keeps_dtype is not None and keeps_dtype(model_config)
    kept = _stored_dtype(folder) if keeps and scheme is None else None
    if device.type == "cpu":
        check_memory(folder, config.path, _LEAST_BYTES.get(Quantization(config.quantization), (kept or dtype).itemsize))
    try:
        model, info = _read(config, folder, model_config, scheme, kept, dtype)
    except (*READING_ERRORS, SafetensorError) as error:
        raise ConfigError(
            f"the weights of {config.path!r} (model type {model_config.model_type}) cannot be loaded: {_named(error)}"
        ) from error
    # Check the result: the head's tensor, completeness, finite weights.
    _tie_head(config.path, model)
    if keeps:
        replace_unread(model, UnreadWeight.as_stored)
    refuse_incomplete(config.path, info, model.state_dict())
    if not is_checked:
        refuse_not_finite_model(config.path, model)
    plain_linears(model)
    logger.info("loaded %s (%s) as %s on %s", config.path, model_config.model_type, dtype, device)
    size = sum(each.numel() * each.itemsize for each in model.parameters()) / (1 << 30)
    with enough_memory(device, f"the weights of {config.path!r}, {size:.1f} GiB", WEIGHTS_REMEDY):
        if device.type != "cpu" or reads_few_bits(device):
            _move_unread(model, device, folder, config, scheme)
        return cast(PreTrainedModel, model.to(device).eval().requires_grad_(False))


def _read(
    config: ModelConfig,
    folder: Path,
    model_config: PreTrainedConfig,
    scheme: Scheme | None,
    kept: torch.dtype | None,
    dtype: torch.dtype,
) -> Any:
    """Return the model and transformers' notes: weights are views of the files, or are read when they are used."""
    if scheme is None:
        refuse_unindexed(folder, model_config.to_dict())
        refuse_unscaled(model_config.to_dict(), tensor_headers(folder), config.path)
    with instead_of_bar(partial(_counted, folder, display_name(config.path))):
        if scheme is None and (kept is not None or _has_views(folder, model_config.to_dict(), dtype)):
            with _storing(kept, config):
                return AutoModelForCausalLM.from_pretrained(
                    config.path, config=model_config, trust_remote_code=False, **_options(kept or dtype)
                )
        return _load_unread(config.path, folder, model_config, scheme, dtype)


def _move_unread(
    model: nn.Module, device: torch.device, folder: Path, config: ModelConfig, scheme: Scheme | None
) -> None:
    """Move weights to a GPU; linear layers of few bits are left for their packing, which takes one at a time."""
    # Which layers are packed later: those that the kernels read in few bits.
    reads, rounds = reads_few_bits(device), Quantization(config.quantization) is not Quantization.NONE
    embeddings = {id(module.weight) for module in model.modules() if type(module) is nn.Embedding}
    linears = [
        module for module in model.modules() if type(module) is nn.Linear and id(module.weight) not in embeddings
    ]
    # Layers that `quantization` rounds are left unread too, whatever their format.
    for module in linears if reads and rounds else ():
        if not isinstance(weight := module.weight, UnreadWeight):
            source = (f"a weight of {list(weight.shape)}", config.path)
            module.weight = nn.Parameter(UnreadWeight(weight.detach, weight.shape, weight.dtype, source), False)
    packed = {id(module.weight) for module in linears} if reads else set()
    num_packed = 0

    def moved(weight: UnreadWeight) -> Tensor:
        nonlocal num_packed
        if id(weight) in packed and (rounds or weight.has_form):
            num_packed += 1
            return weight.on(device)
        return weight.read().to(device)

    # Move the rest now.
    replace_unread(model, moved)
    if scheme is not None and not rounds:
        _warn_of_size(model, device, folder, scheme, num_packed)


def _warn_of_size(model: nn.Module, device: torch.device, folder: Path, scheme: Scheme, num_packed: int) -> None:
    """Log the quantized weights that are not computed as they are stored, and the memory that they take."""
    num_stored = len(stored_weights(scheme, tensor_headers(folder), str(folder)))
    if num_stored <= num_packed:
        return
    size = sum(each.numel() * each.itemsize for each in model.parameters()) / (1 << 30)
    files = sum(file.stat().st_size for file in weight_files(folder)) / (1 << 30)
    major, minor = torch.cuda.get_device_capability(device)
    logger.warning(
        "%d of %d weights in %s are computed in the model's dtype on this GPU of compute capability %d.%d: all take up "
        "to %.1f GiB, and their files %.1f. Few bits need Triton, a GPU of 8.0 or later, and linear layers whose "
        "groups of inputs are in order and multiples of 32",
        *(num_stored - num_packed, num_stored, scheme.method, major, minor, size, files),
    )


def _storing(kept: torch.dtype | None, config: ModelConfig) -> AbstractContextManager[None]:
    """Let experts stay in the files where packing them needs no look at their numbers."""
    is_rounded = kept is not None and Quantization(config.quantization) is not Quantization.NONE
    return storing_experts() if is_rounded or kept is torch.bfloat16 else nullcontext()


def _stored_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype of all floating tensors of a checkpoint; None if they have several."""
    found = {header.dtype for header in tensor_headers(folder).values()} - _NUMBERS
    return FLOATS.get(found.pop()) if len(found) == 1 else None


def _has_views(folder: Path, config: Mapping[str, object], dtype: torch.dtype) -> bool:
    """True if transformers' tensors will be views of the files, or only transformers knows which files it reads."""
    files = [file.name for file in weight_files(folder)]
    is_known = WHOLE not in files or (len(files) == 1 and not (folder / INDEX).is_file())
    return _stored_dtype(folder) == dtype or not is_known or bool(config.get("transformers_weights"))


def _tie_head(path: str, model: PreTrainedModel) -> None:
    """Let `tie_word_embeddings` choose the head if a checkpoint stores both a head and the embedding.

    transformers keeps the second tensor if its numbers differ.
    """
    before = model.get_output_embeddings()
    stored = None if before is None else before.weight
    model.tie_weights()
    head = model.get_output_embeddings()
    if head is not None and head.weight is not stored:
        logger.warning(
            "%s has a separate head, which is ignored: tie_word_embeddings is true, so the embedding is the head",
            path,
        )


def _options(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "attn_implementation": "eager",
        "use_safetensors": True,
        "ignore_mismatched_sizes": True,  # refused by name later
        "output_loading_info": True,
    }


def fetched_folder(path: str) -> Path:
    """Return the folder of a model's files; a Hub model's is in the cache."""
    local = Path(path).expanduser()
    return local if local.is_dir() or _looks_local(path) else fetch_model(path)


def display_name(path: str) -> str:
    """Return a Hub id unchanged, or the last two parts of a folder's path."""
    return "/".join(Path(path).parts[-2:])


def _load_unread(path: str, folder: Path, config: PreTrainedConfig, scheme: Scheme | None, dtype: torch.dtype) -> Any:
    """Load a model whose weights are dequantized, or converted to `dtype`, one by one when they are used."""
    weights = unread_weights(folder, scheme)
    for section in SECTIONS:
        if hasattr(config, section):
            delattr(config, section)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    outline.config.name_or_path = path  # the text part's configuration, where the class takes that
    with storing_experts():
        model, info = type(outline).from_pretrained(None, config=outline.config, state_dict=weights, **_options(dtype))
    model.name_or_path = path
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, info


def resolve_device(name: str) -> torch.device:
    """Return the device; `auto` is the first visible GPU, or the processor."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}; it must be auto, cpu or cuda[:n]") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device is {name!r} but torch {torch.__version__} sees no CUDA device (CUDA_VISIBLE_DEVICES is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES')!r}); use cpu or auto, or update the driver"
        )
    return device


def load_config(path: str) -> PreTrainedConfig:
    """Return the model's configuration without its weights; raises ConfigError if it does not exist."""
    if _looks_local(path) and not Path(path).expanduser().is_dir():
        raise ConfigError(f"model folder {path!r} does not exist; give a local folder or a Hub id such as 'org/name'")
    try:
        config = cast(PreTrainedConfig, AutoConfig.from_pretrained(path, trust_remote_code=False))
        config.get_text_config()  # raises where several parts are models of text
        return config
    except READING_ERRORS as error:
        raise ConfigError(f"{path!r} holds no model configuration that transformers knows: {_named(error)}") from error


def _named(error: Exception) -> str:
    """Return an error's class and text, since a KeyError's text is a single word."""
    return f"{type(error).__name__}: {error}"


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).is_dir()


def model_version(path: str, quantization: str = "none", *dtypes: str) -> str:
    """Return a digest of the weights, equal on every machine with the same files.

    It covers the configuration and every byte of the weights, so a fine-tune of one row differs. A large file is read
    once per machine (`file_digest`), several files in parallel. `quantization` and `dtypes` name everything else that
    texts depend on.
    """
    folder = model_folder(path)
    digest = blake2b((folder / "config.json").read_bytes(), digest_size=16)
    if quantization != "none":
        digest.update(f"{quantization} in groups of 32, rows for int8 with bases".encode())
    digest.update("\0".join(dtypes).encode())
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    with ThreadPoolExecutor() as pool:
        for file, contents in zip(files, pool.map(file_digest, files), strict=True):
            digest.update(f"{file.name}\0{contents}\0".encode())
    return digest.hexdigest()


def tokenizer_file(path: str) -> Path | None:
    """Return the model's tokenizer.json, or None."""
    file = model_folder(path) / "tokenizer.json"
    return file if file.is_file() else None


def model_folder(path: str) -> Path:
    """Return the folder of the model's files; a Hub model must already be cached."""
    if Path(path).expanduser().is_dir():
        return Path(path).expanduser()
    config_file = cached_file(path, "config.json")
    assert config_file is not None, "the model was loaded from this cache"
    return Path(config_file).parent


_Parameters = Iterable[tuple[str, Any]]
_LOADING = "Loading weights"  # the description of transformers' bar over parameters


@contextmanager
def instead_of_bar(pass_on: Callable[[_Parameters], _Parameters] = iter) -> Iterator[None]:
    """Let `pass_on` hand out the parameters that the block loads; transformers' own bar is not shown."""
    previous = set_tqdm_hook(partial(_bar, pass_on))
    try:
        yield
    finally:
        set_tqdm_hook(previous)


def _bar(
    pass_on: Callable[[_Parameters], _Parameters],
    factory: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    is_loading = options.get("desc") == _LOADING and args
    return pass_on(args[0]) if is_loading else factory(*args, **options)


def _counted(folder: Path, model: str, parameters: _Parameters) -> _Parameters:
    """Yield transformers' parameters and report their bytes; a request for the next means that the last has been read.

    A parameter without a tensor of its name (joined experts) counts as the mean of all.
    """
    items = list(parameters)
    sizes = {name: math.prod(header.shape) for name, header in tensor_headers(folder).items()}
    whole = sum(sizes.values()) or 1
    mean = whole / max(1, len(items))
    total_bytes = sum(file.stat().st_size for file in weight_files(folder))
    report = ProgressReport("reading", model, total_bytes)
    num_read = 0.0
    for name, mapping in items:
        yield name, mapping
        num_read += sizes.get(name, mean)
        report.at(int(total_bytes * min(1.0, num_read / whole)))
    report.at(total_bytes)
