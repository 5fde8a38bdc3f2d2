"""Model files: paths and Hub ids, GGUF conversions, and a check of all files before replicas make room."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from cluster.config import DeployConfig
from engine.config import ModelDtype, Quantization, SamplingSource
from engine.model.checkpoint.end_tokens import find_end_tokens, read_generation_config, refuse_tokens_without_rows
from engine.model.checkpoint.gguf_header import read_gguf_header
from engine.model.checkpoint.hub import cached_folder, find_model, require_model, require_repository
from engine.model.checkpoint.sampling_defaults import defaults_of
from engine.model.checkpoint.scheme import WeightFormat, scheme_of
from engine.model.checkpoint.stored_weights import refuse_unscaled, stored_weights
from engine.model.checkpoint.weight_files import (
    cache_root,
    file_digest,
    read_config,
    refuse_unindexed,
    refuse_untyped,
    tensor_headers,
)
from protos.errors import ConfigError
from router.tokenizer.tokenizer_files import load_tokenizer_files

logger = logging.getLogger(__name__)

_PROJECT = Path(__file__).resolve().parents[1]
GGUF = ".gguf"
_UNFINISHED = ".unfinished-"  # conversions
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")
_HEAD_FILES = ("*.safetensors", "*.pt", "*.bin")
_GPU_FACTORS = {Quantization.INT8: 0.6, Quantization.INT4: 0.4}  # of bfloat16, embeddings among them
_READ_FORMATS = {WeightFormat.GPTQ, WeightFormat.AWQ, WeightFormat.PACKED, WeightFormat.SCALED}  # by our products


def resolve_model_path(path: str) -> str:
    """Return an absolute folder or GGUF file, or the Hub id unchanged.

    A relative path is resolved in the current folder, then in the project's, so that the bundled models are found
    wherever `serve deploy` builds the application.

    Raises:
        ConfigError: the path is no existing folder or file and no Hub id, or cannot be read.
    """
    try:
        return _resolve(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: `~name`, and this machine has no such user
        raise ConfigError(
            f"model path {path!r} cannot be looked up: {error}; give a path that exists, and let this user read it"
        ) from error


def _resolve(path: str) -> str:
    for folder in (Path(path).expanduser().absolute(), _PROJECT / path):
        if folder.is_file() and folder.suffix == GGUF:
            return str(folder)
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                file = next(iter(sorted(folder.glob("*.gguf"))), None)
                remedy = f"give the file itself, {str(file)!r}" if file else "give the folder of a model"
                raise ConfigError(f"model folder {str(folder)!r} has no config.json; {remedy}")
            return str(folder)
    if path.endswith(GGUF):
        raise ConfigError(f"GGUF file {path!r} is neither here ({Path.cwd()}) nor in {_PROJECT}")
    if _HUB_ID.fullmatch(path):
        return path
    raise ConfigError(
        f"model path {path!r} is neither a folder here ({Path.cwd()}) or in {_PROJECT}, nor a Hub id such as 'org/name'"
    )


def check_models(config: DeployConfig) -> list[str]:
    """Check the target's weights and tokenizer and the drafts' weights; return what an operator should know.

    A redeploy that cannot work is thus refused while the old pairs still serve. Only the headers of weights are read.
    A model that is only on the Hub is downloaded on the node that loads it.

    Raises:
        ConfigError: a file is missing or truncated, its format does not match its name or is unsupported, or a model
            is neither here nor on the Hub.
    """
    notes = [f"{path!r} is no folder here, so it is taken as a Hub id" for path in hub_models(config)]
    target = Path(resolve_model_path(config.target.path))
    if target.is_dir():
        # Weights, sampling defaults, end tokens, vocabulary and template of the target.
        _check_weights(target)
        if config.target.generation_config is SamplingSource.AUTO:
            defaults_of(read_generation_config(target))
        template = config.ingress.chat_template_text
        notes += [*_end_notes(config.model_id, target, template), *_vocabulary_notes(target, template)]
        if load_tokenizer_files(str(target), template).chat_template is None:
            notes.append(
                f"{config.model_id!r} has no chat template: chat requests get a 400. A template for it goes into "
                f"{target / 'chat_template.jinja'}"
            )
    for path in config.draft_models.values():
        draft = Path(resolve_model_path(path))
        if draft.is_dir():
            _check_weights(draft)
    for model_id in hub_models(config):
        require_model(model_id)
    head = config.draft.head
    if head is not None and head.path is not None:
        _check_head(resolve_model_path(head.path))
    return notes


def _vocabulary_notes(folder: Path, template: str | None) -> list[str]:
    config = read_config(folder)
    text = config.get("text_config")
    vocab_size = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    note = refuse_tokens_without_rows(folder, vocab_size, template) if isinstance(vocab_size, int) else None
    return [] if note is None else [note]


def _end_notes(model_id: str, folder: Path, template: str | None) -> list[str]:
    ends, _ = find_end_tokens(folder, template=template)
    if ends:
        return []
    return [
        f"{model_id!r} names no end token: texts end at max_tokens, and constrained output is refused, unless its "
        f"family has one. Add eos_token_id to {folder / 'generation_config.json'}"
    ]


def _check_weights(folder: Path) -> None:
    headers = tensor_headers(folder)
    if not headers:
        raise ConfigError(f"model folder {str(folder)!r} has no weights in safetensors, and names no GGUF file")
    config = read_config(folder)
    refuse_untyped(folder, config)
    scheme = scheme_of(config, str(folder))
    if scheme is not None:
        stored_weights(scheme, headers, str(folder))
    else:
        refuse_unindexed(folder, config)
        refuse_unscaled(config, headers, str(folder))


def _check_head(path: str) -> None:
    """Raise ConfigError for a head without files; the loader checks their content."""
    folder = Path(path)
    if not folder.is_dir():
        require_repository(path)
    elif not any(file for pattern in _HEAD_FILES for file in folder.glob(pattern)):
        raise ConfigError(f"draft.path {path!r} has no weights of a head; it needs one of {', '.join(_HEAD_FILES)}")


def hub_models(config: DeployConfig) -> list[str]:
    """Return the Hub ids among a deployment's models, without heads."""
    paths = (config.target.path, *config.draft_models.values())
    return [path for path in paths if not Path(resolve_model_path(path)).exists()]


def weight_bytes(path: str) -> int:
    """Return the bytes of a model's loaded weights, with 2 bytes for each quantized number.

    For a Hub id without local files, ask the Hub; return 0 if it does not answer.
    """
    folder = Path(resolve_model_path(path))
    if not folder.is_dir():
        cached = cached_folder(path)
        if cached is None:
            return _bytes_on_hub(path)
        folder = cached
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    scheme = scheme_of(read_config(folder), str(folder))
    if scheme is not None:
        quantized = stored_weights(scheme, tensor_headers(folder), str(folder))
        num_bytes += sum(2 * math.prod(stored.shape) for stored in quantized)
    return num_bytes


def gpu_weight_bytes(path: str, quantization: Quantization = Quantization.NONE, num_ranks: int = 1) -> int:
    """Return the bytes of a model's weights on one of `num_ranks` GPUs.

    On one GPU a model keeps its quantized weights if the GPU's kernels read their format. Ranks of a sharded model have
    2 bytes per number.
    """
    folder = Path(resolve_model_path(path))
    folder = folder if folder.is_dir() else cached_folder(path) or folder
    scheme = scheme_of(read_config(folder), str(folder)) if folder.is_dir() else None
    if num_ranks == 1 and quantization is not Quantization.NONE:
        return int(_GPU_FACTORS[quantization] * weight_bytes(path))
    is_read = scheme is not None and _READ_FORMATS.issuperset(scheme.formats) and not scheme.has_group_index
    if num_ranks == 1 and is_read:
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return weight_bytes(path) // num_ranks


def _bytes_on_hub(model_id: str) -> int:
    try:
        return find_model(model_id).num_bytes
    except ConfigError:  # the download will report it
        return 0


def convert_gguf_models(config: DeployConfig, report: Callable[[str], None] = logger.info) -> DeployConfig:
    """Return `config` with each GGUF file replaced by its converted folder; call `report` before a conversion.

    Raises:
        ConfigError: a file is missing, cut short, or not one that transformers reads.
    """
    target = config.target.model_copy(update={"path": _folder_of(config.target.path, None, report)})
    draft = config.draft
    if draft.path is not None:
        draft = draft.model_copy(update={"path": _folder_of(draft.path, draft.dtype, report)})
    drafts = {name: _folder_of(path, draft.dtype, report) for name, path in config.drafts.items()}
    return config.model_copy(update={"target": target, "draft": draft, "drafts": drafts})


def _folder_of(path: str, dtype: ModelDtype | None, report: Callable[[str], None]) -> str:
    """Return the path of a model, and for a GGUF file the folder of its conversion.

    Numbers are converted to `dtype`; None keeps the quantized blocks of the file. A draft has a dtype, since it may be
    tuned.
    """
    if not path.endswith(GGUF):
        return path
    file = Path(resolve_model_path(path))
    read_gguf_header(file)  # refuses a broken file before the conversion
    # 3: the version of the conversion. Increase it when that changes.
    try:
        folder = converted_root() / f"{file.stem}-{file_digest(file)[:12]}-{dtype or 'blocks'}-3"
        if not folder.is_dir():
            how = "its blocks are kept" if dtype is None else f"its numbers are exact in float32, then {dtype}"
            report(f"converting {file} into {folder}, once: {how}")
            _convert(file, folder, dtype)
    except OSError as error:
        raise ConfigError(
            f"{str(file)!r} cannot be converted: {error}; set XDG_CACHE_HOME to a folder that this user can write to"
        ) from error
    return str(folder)


def converted_root() -> Path:
    """Return the folder of converted files; it may not exist."""
    return cache_root() / "models"


def _convert(file: Path, folder: Path, dtype: ModelDtype | None) -> None:
    """Convert in a child process, which loads torch and frees its memory at its end."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f"{_UNFINISHED}*"):
        with suppress(OSError), _locked(left):  # its process was killed
            shutil.rmtree(left)
    with TemporaryDirectory(prefix=_UNFINISHED, dir=folder.parent) as unfinished, _locked(Path(unfinished)):
        made = Path(unfinished) / "model"
        command = [sys.executable, "-m", "engine.model.checkpoint.gguf", str(file), str(made), *filter(None, [dtype])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{str(file)!r} was not converted within an hour") from None
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            raise ConfigError(done.stdout.strip() or f"{str(file)!r} was not converted ({done.returncode}): {last}")
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder while this process lives. Raises OSError if another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
