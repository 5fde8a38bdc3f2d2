"""Models of the Hugging Face Hub: sizes before a download, and resumable downloads.

Weights go to the Hub's own cache in its documented layout: `blobs/DIGEST`, linked from `snapshots`. The Hub's client
deletes a file that is cut short, often 5 GB; this module keeps it and requests only the rest.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_url, snapshot_download
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError  # type: ignore[attr-defined]  # of its library
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import WeakFileLock, build_hf_headers, disable_progress_bars  # type: ignore[attr-defined]

from engine.config import GIB
from engine.model.checkpoint.node_memory import available_bytes
from engine.model.checkpoint.progress import ProgressReport
from engine.model.checkpoint.weight_files import SHA256_DIGITS
from protos.errors import ConfigError

_WEIGHTS = "*.safetensors"
_FILES = (_WEIGHTS, "*.json", "*.txt", "*.model", "*.jinja")  # and configuration, tokenizer
_COPIES = ("*/*", "consolidated*")  # the same weights in other formats
_API_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository; `blob` is its path in the cache, named by its digest."""

    name: str
    num_bytes: int
    blob: Path

    @property
    def partial(self) -> Path:
        """Path of the unfinished download."""
        return self.blob.with_name(f"{self.blob.name}.part")

    @property
    def num_cached_bytes(self) -> int:
        """Bytes that are already fetched."""
        if self.blob.exists():
            return self.num_bytes
        return self.partial.stat().st_size if self.partial.exists() else 0


@dataclass(frozen=True, slots=True)
class HubModel:
    """The current version of a model on the Hub."""

    model_id: str
    commit: str
    weights: tuple[HubFile, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(file.num_bytes for file in self.weights)

    @property
    def num_cached_bytes(self) -> int:
        return sum(file.num_cached_bytes for file in self.weights)


def cached_folder(model_id: str) -> Path | None:
    """Return the folder of a completely cached model, or None."""
    try:
        folder = _snapshot(model_id, local_files_only=True)
    except (OSError, ValueError):  # the Hub client's errors derive from these two
        return None
    return folder if any(folder.glob(_WEIGHTS)) else None


@lru_cache(maxsize=8)
def find_model(model_id: str) -> HubModel:
    """Return a model's current version and its sizes.

    Raises:
        ConfigError: the Hub cannot be reached, has no such model, or has no weights in safetensors.
    """
    with _reported_errors(model_id):
        info = HfApi().model_info(model_id, files_metadata=True, timeout=_API_TIMEOUT_S)
    blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model_id, repo_type="model") / "blobs"
    weights = tuple(
        HubFile(each.rfilename, each.size or 0, blobs / (each.lfs.sha256 if each.lfs else each.blob_id or ""))
        for each in info.siblings or ()
        if fnmatch(each.rfilename, _WEIGHTS) and not any(fnmatch(each.rfilename, pattern) for pattern in _COPIES)
    )
    if not weights:
        raise ConfigError(
            f"{model_id!r} on the Hub has no weights in safetensors; give another model, or a local GGUF file"
        )
    return HubModel(model_id, info.sha or "main", weights)


def require_model(model_id: str) -> None:
    """Raise ConfigError unless a model is completely cached or on the Hub. Nothing is fetched."""
    if cached_folder(model_id) is None:
        find_model(model_id)


def require_repository(repository_id: str) -> None:
    """Raise ConfigError unless a head's repository, in any format, is cached or on the Hub."""
    try:
        snapshot_download(repository_id, local_files_only=True)
    except (OSError, ValueError):
        with _reported_errors(repository_id):
            HfApi().model_info(repository_id, timeout=_API_TIMEOUT_S)


def fetch_model(model_id: str) -> Path:
    """Return the folder of a model on the Hub; fetch missing files, with progress.

    Several processes may call this for one model: the first fetches, the others wait.

    Raises:
        ConfigError: it cannot be fetched, does not fit the disk, or its weights exceed this node's memory.
    """
    if (folder := cached_folder(model_id)) is not None:
        return folder
    model = find_model(model_id)
    _check_room(model)
    disable_progress_bars()
    with _reported_errors(model_id):
        _fetch_weights(model)
        return _snapshot(model_id)


def _snapshot(model_id: str, local_files_only: bool = False) -> Path:
    """Fetch the small files; return the folder with the links to all files."""
    folder = snapshot_download(
        model_id,
        allow_patterns=list(_FILES),
        ignore_patterns=list(_COPIES),
        local_files_only=local_files_only,
    )
    return Path(folder)


def _check_room(model: HubModel) -> None:
    """Raise ConfigError before the download if the weights exceed the disk or this node's memory.

    The memory bound is a lower one: quantized weights may take less while serving, but not while loading.
    """
    if model.num_bytes > (available := available_bytes()):
        raise ConfigError(
            f"the weights of {model.model_id!r} are {model.num_bytes / GIB:.1f} GiB, but this node has "
            f"{available / GIB:.1f} GiB of memory available; nothing was fetched. Take a smaller or quantized model, "
            "or a larger node"
        )
    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    missing, free = model.num_bytes - model.num_cached_bytes, shutil.disk_usage(cache).free
    if missing > free:
        raise ConfigError(
            f"{missing / GIB:.1f} GiB of {model.model_id!r} must be fetched into {str(cache)!r}, which has "
            f"{free / GIB:.1f} GiB free; make room, or set HF_HOME to a larger disk"
        )


def _fetch_weights(model: HubModel) -> None:
    first_bytes = model.num_cached_bytes
    report = ProgressReport("fetching", model.model_id, model.num_bytes, first_bytes)
    watch = _Watch()
    with ThreadPoolExecutor(4, thread_name_prefix="hub") as pool:
        running: set[Future[None]] = {pool.submit(_fetch, model, file, watch) for file in model.weights}
        try:
            while running:
                done, running = wait(running, 0.2, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                report.at(model.num_cached_bytes)
        finally:  # on an error or Ctrl-C the other downloads end with their next chunk
            watch.is_ended = True
            pool.shutdown(cancel_futures=True)


class _Watch:
    """Stands in for the Hub client's progress bar, called with every chunk; it only ends a download."""

    is_ended = False

    def __call__(self, **options: object) -> _Watch:
        return self

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *error: object) -> None: ...

    def close(self) -> None: ...

    def update(self, num_bytes: int) -> None:
        if self.is_ended:
            raise OSError("another download failed or was stopped")


def _fetch(model: HubModel, file: HubFile, watch: _Watch) -> None:
    file.blob.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(file.blob.with_name(f"{file.blob.name}.lock")):
        if file.blob.exists():
            return
        # Another process may have fetched it while this one waited for the lock; else go on from the cached bytes.
        resumed = file.num_cached_bytes
        with file.partial.open("ab") as stream:
            if resumed < file.num_bytes:
                url = hf_hub_url(model.model_id, file.name, revision=model.commit)
                http_get(
                    url,
                    stream,
                    resume_size=resumed,
                    headers=build_hf_headers(),
                    expected_size=file.num_bytes,
                    tqdm_class=watch,  # type: ignore[arg-type]  # called like a class, and no more
                )
        # Parts from several downloads are checked before the file gets its name.
        if resumed and not _is_whole(file):
            file.partial.unlink()
            raise OSError(f"{file.name} does not match its digest on the Hub; its parts are removed, start again")
        file.partial.replace(file.blob)


def _is_whole(file: HubFile) -> bool:
    """True if a file fetched in several parts has the digest of its name."""
    if len(file.blob.name) != SHA256_DIGITS:
        return file.partial.stat().st_size == file.num_bytes
    with file.partial.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == file.blob.name


@contextmanager
def _reported_errors(model_id: str) -> Iterator[None]:
    try:
        yield
    except LocalEntryNotFoundError as error:
        raise ConfigError(_refusal(model_id, error.__cause__ or error)) from None
    except (OSError, ValueError, HTTPError) as error:
        raise ConfigError(_refusal(model_id, error)) from None


def _refusal(model_id: str, error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = " ".join(lines[:2]) or type(error).__name__
    return (
        f"{model_id!r} is not a local folder, and the Hub does not provide it: {reason}; check the name, the network "
        "(or HF_ENDPOINT) and, for a gated model, HF_TOKEN. Fetched files are kept and not fetched again"
    )
