"""Safetensors files of a model folder: their digests, and the headers of their tensors. No weight is read."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from protos.errors import ConfigError

logger = logging.getLogger(__name__)

FLOATS = ("BF16", "F16", "F32", "F64")  # not packed; scales of packed weights have them too
SHA256_DIGITS = 64

_DIGEST = re.compile(f"[0-9a-f]{{{SHA256_DIGITS}}}")
_LARGE_BYTES = 64 << 20  # reading a smaller file takes less than a stored digest would save
_MAX_NOTES = 256


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a file's contents in hexadecimal digits.

    The Hub's cache names a file by its digest. For other large files the digest is noted in the user's cache, under
    file attributes that change with the contents. A file that changed within 2 s of being read is not noted, since it
    may change again in the same tick of the file system's clock.
    """
    real = file.resolve()
    if real.parent.name == "blobs" and len(real.name) == SHA256_DIGITS:
        return real.name
    if real.stat().st_size < _LARGE_BYTES:
        return _read(real)
    try:
        return _noted_digest(real)
    except OSError as error:
        logger.warning("cannot note the digest of %s; the file is read again at the next start: %s", file, error)
        return _read(real)


def _noted_digest(file: Path) -> str:
    identity = _identity(file)
    note = digests_root() / "-".join(map(str, identity))
    note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(os.open(note, os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="ascii", errors="replace") as text:
        fcntl.flock(text, fcntl.LOCK_EX)  # one process of a pair reads the file, the others wait for it
        noted = text.read(SHA256_DIGITS + 1)
        if _DIGEST.fullmatch(noted) and os.fstat(text.fileno()).st_uid == os.geteuid():
            os.utime(note)  # the time of its last use
            return noted
        began_ns = time.time_ns()
        digest = _read(file)
        is_settled = began_ns - max(identity[-2:]) > 2e9  # file systems count time in steps of up to 2 s
        if is_settled and _identity(file) == identity:
            text.seek(0)
            text.truncate()
            text.write(digest)
    _forget_old_notes()
    return digest


def _identity(file: Path) -> tuple[int, ...]:
    stat = file.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _forget_old_notes() -> None:
    """Remove the notes that were not used for longest, so that `_MAX_NOTES` stay."""
    with suppress(FileNotFoundError):  # another process removes notes too
        notes = sorted(digests_root().iterdir(), key=lambda note: -note.stat().st_mtime_ns)
        for note in notes[_MAX_NOTES:]:
            note.unlink()


def digests_root() -> Path:
    """Return the folder of noted digests; it may not exist."""
    return cache_root() / "digests"


def begin_digests(path: str) -> None:
    """Begin to read a model folder's large files for their digests, in a thread, while the caller imports torch."""
    files = [each for each in Path(path).expanduser().glob("*.safetensors") if each.stat().st_size >= _LARGE_BYTES]

    def read() -> None:
        with suppress(OSError):  # loading reports it
            for file in sorted(files):
                file_digest(file)

    threading.Thread(target=read, name="digests", daemon=True).start()


def cache_root() -> Path:
    """Return the folder of all that is kept on disk; it may not exist.

    A relative XDG_CACHE_HOME is ignored, as its specification demands: each process has its own current folder.

    Raises:
        OSError: this user has no home folder.
    """
    for name in (os.environ.get("XDG_CACHE_HOME", ""), "~/.cache"):
        if os.path.isabs(root := os.path.expanduser(name)):
            return Path(root) / "outrider"
    raise FileNotFoundError("this user has no home folder for a cache; set XDG_CACHE_HOME to the path of a folder")


def _read(file: Path) -> str:
    began_s = time.monotonic()
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    logger.debug("read %s for its digest in %.1f s", file, time.monotonic() - began_s)
    return digest


WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LENGTH = struct.Struct("<Q")  # of a file's header


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor's dtype in safetensors' spelling ("BF16", "I32", "F8_E4M3"), and its shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """Return the files that the index names, or all files without an index.

    Raises:
        ConfigError: the index is invalid.
    """
    index = folder / INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    match _read_json(index):
        case {"weight_map": dict(names)} if all(map(_is_file_name, names.values())):
            return sorted(folder / name for name in set(names.values()))
    raise ConfigError(
        f"{str(index)!r} is not an index of weights: it needs a 'weight_map' from tensors to file names in its folder; "
        "fetch it again"
    )


def _is_file_name(name: object) -> bool:
    """True for a plain file name: no path that leads out of the folder, and no lone surrogate."""
    return isinstance(name, str) and name.isprintable() and name not in ("", ".", "..") and not {*name} & {*"/\\"}


def refuse_unindexed(folder: Path, config: Mapping[str, object]) -> None:
    """Raise ConfigError for a model whose files transformers cannot find; quantized models are read without it.

    transformers opens model.safetensors, the files of an index, or the file named by `transformers_weights`.
    """
    if (folder / WHOLE).is_file() or config.get("transformers_weights"):
        return
    index = folder / INDEX
    if not index.is_file():
        names = ", ".join(file.name for file in sorted(folder.glob("*.safetensors")))
        raise ConfigError(
            f"model folder {str(folder)!r} has no {WHOLE} and no index of its parts (*.safetensors in it: "
            f"{names or 'none'}); fetch {INDEX} and the parts that it names, or rename a single file to {WHOLE}"
        )
    match _read_json(index):
        case {"metadata": dict()}:
            return
    raise ConfigError(
        f"{str(index)!r} has no mapping 'metadata', which transformers requires; fetch it again, or "
        'add "metadata": {} to it'
    )


def tensor_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the headers of all tensors by name.

    Raises:
        ConfigError: a file is missing, cut short or not safetensors.
    """
    headers = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 -- not a mapping
                    part = tensors.get_slice(name)
                    headers[name] = TensorHeader(file, str(part.get_dtype()), tuple(part.get_shape()))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{str(file)!r} is not a whole safetensors file: {error}; fetch it again") from None
    return headers


def read_config(folder: Path) -> Mapping[str, object]:
    """Return the contents of the folder's config.json.

    Raises:
        ConfigError: the file is missing or not a JSON mapping.
    """
    return read_mapping(folder / "config.json")


def refuse_untyped(folder: Path, config: Mapping[str, object]) -> None:
    """Raise ConfigError if `config` lacks the model type that selects transformers' class."""
    if not isinstance(kind := config.get("model_type"), str):
        raise ConfigError(
            f"{str(folder / 'config.json')!r} has model_type {kind!r}; it must name the model's type, such as 'llama': "
            "fetch it again"
        )


def read_mapping(file: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file.

    Raises:
        ConfigError: the file is missing, or holds no mapping.
    """
    content = _read_json(file)
    if not isinstance(content, dict):
        raise ConfigError(f"{str(file)!r} does not hold a JSON mapping; fix it, or fetch it again")
    return content


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error}; fix it, or fetch it again") from None


class SafetensorsWriter:
    """Writes tensors one by one; the header comes last, into a place that was left for it."""

    def __init__(self, file: Path, room: int) -> None:
        """Begin a file whose header takes at most `room` bytes."""
        self.file = file
        self._room = -(-room // 64) * 64
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._stream = file.open("wb")
        self._stream.seek(_LENGTH.size + self._room)
        self._size = 0

    def add(self, name: str, dtype: str, shape: Sequence[int], contents: memoryview) -> None:
        """Write a tensor of a dtype in safetensors' spelling; a file has one dtype, so that mapped ones are aligned."""
        offsets = [self._size, self._size + contents.nbytes]
        self._header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        self._stream.write(contents)
        self._size += contents.nbytes

    def close(self) -> None:
        """Write the header."""
        header = json.dumps(self._header).encode()
        assert len(header) <= self._room, "a name takes less than its room"
        self._stream.seek(0)
        self._stream.write(_LENGTH.pack(self._room) + header.ljust(self._room))
        self._stream.close()


def write_index(folder: Path, files: Sequence[Path]) -> None:
    """Let transformers find the tensors of `files`; a single file gets the usual name."""
    if len(files) == 1:
        files[0].rename(folder / WHOLE)
        return
    names = {name: file.name for file in files for name in _names(file)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}), encoding="utf-8")


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="numpy") as tensors:
        return list(tensors.keys())
