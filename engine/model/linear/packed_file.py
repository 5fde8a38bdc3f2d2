"""Packed weights in a file of the user's cache. Later starts map it, and processes of one node share its pages.

An entry is a folder. Its name is a digest of the checkpoint, the settings, and our kernels and code. Its file has the
arrays, then an index in JSON with the same facts and each array's digest. A damaged or foreign file is made again.
Arrays are mapped as they are written, so memory holds one product at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from engine.model.linear.cache_folder import ABOUT, LEAST_FREE, make_room, max_bytes, packed_root
from engine.model.linear.weight_store import LINE_BYTES, NO_STORE, PAGE_BYTES, WeightStore, decoded, encoded

logger = logging.getLogger(__name__)

T = TypeVar("T")
_MAGIC = b"outrider"
_END = struct.Struct("<32sQ8s")  # digest and bytes of the index, magic
_UNUSABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, struct.error)


@contextmanager
def packed_weights(facts: dict[str, str], model: str, *, repeats_checks: bool = False) -> Iterator[WeightStore]:
    """Yield the store of the weights with these `facts`; without an error, new products are kept.

    One process at a time makes an entry, and others wait. If the folder or its disk cannot be used, nothing is kept.

    Args:
        facts: everything that packed weights depend on, with `quantization`.
        model: a name for the operator.
        repeats_checks: ignore the checks of earlier starts.
    """
    if not max_bytes():
        yield NO_STORE
        return
    facts = {**facts, "format": "1"}  # increase it when the file's layout changes
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    try:
        store = _opened(packed_root() / name, facts, model)
    except OSError as error:
        logger.warning("packed weights are not kept: %s", error)
        yield NO_STORE
        return
    store.is_checked = store.is_checked and not repeats_checks
    try:
        yield store
    except BaseException:
        store.give_up()
        raise
    store.close()


def _opened(entry: Path, facts: dict[str, str], model: str) -> _FileStore:
    _private_folder(entry)
    about = json.dumps({"model": model, "quantization": facts.get("quantization", "?")})
    _write_private(entry / ABOUT, about.encode())
    if (kept := _read_kept(entry, facts)) is not None:
        return _FileStore(entry, kept)
    lock = _locked(entry)
    kept = _read_kept(entry, facts)  # another process may have made it
    if kept is None:
        return _FileStore(entry, {}, _Writer(entry, facts, lock))
    lock.close()
    return _FileStore(entry, kept)


def _private_folder(entry: Path) -> None:
    """Make the entry's folder, which only this user may write to; raises OSError if another may."""
    entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    entry.mkdir(mode=0o700, exist_ok=True)
    for folder in (entry.parent, entry):
        found = folder.stat()
        if found.st_uid != os.geteuid():
            raise PermissionError(f"{str(folder)!r} is another user's; set XDG_CACHE_HOME to a folder of your own")
        if found.st_mode & 0o077:
            folder.chmod(0o700)


def _locked(entry: Path) -> BinaryIO:
    """Return the entry's lock file, locked until it is closed; raises OSError after half an hour."""
    lock = open(os.open(entry / "lock", os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)  # noqa: SIM115 -- kept open
    began_s = time.monotonic()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            waited_s = time.monotonic() - began_s
        if waited_s > 1800:  # another process packs the same weights
            lock.close()
            raise TimeoutError(f"another process holds {str(entry / 'lock')!r} for half an hour")
        time.sleep(0.1)


def _write_private(file: Path, contents: bytes) -> None:
    with suppress(OSError):
        file.unlink()
    with open(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as stream:
        stream.write(contents)


class _FileStore(WeightStore):
    """One entry of the cache: mapped, or being written."""

    def __init__(self, entry: Path, kept: dict[str, Any], writer: _Writer | None = None) -> None:
        self._notes, self._kept, self._writer = entry / "agreed", kept, writer
        self.is_checked = writer is None

    def product(self, name: str, make: Callable[[], T]) -> T:
        if name in self._kept:
            found: T = self._kept.pop(name)
            return found
        made = make()
        return made if self._writer is None else self._written(self._writer, name, made)

    def _written(self, writer: _Writer, name: str, made: T) -> T:
        try:
            return writer.add(name, made)
        except TypeError:  # a product of torch's own, which is made at every start
            return made
        except OSError as error:
            logger.warning("packed weights are not kept: %s", error)
            self.give_up()
            return made

    def has_agreed(self, note: str) -> bool:
        try:
            return self.is_checked and note in self._notes.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            return False

    def agree(self, note: str) -> None:
        with (
            suppress(OSError),
            open(os.open(self._notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as notes,
        ):
            notes.write(f"{note}\n".encode())

    def give_up(self) -> None:
        """Leave no file; mapped tensors stay valid."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None

    def close(self) -> None:
        """Finish the file in a thread, since a slow disk must not delay the start."""
        if self._writer is not None:
            threading.Thread(target=self._writer.finish, name="packed-weights").start()
            self._writer = None


class _Writer:
    """Writes a file under a temporary name, and maps each product."""

    def __init__(self, entry: Path, facts: dict[str, str], lock: BinaryIO) -> None:
        self._entry, self._facts, self._lock = entry, facts, lock
        self._part = entry / "weights.part"
        self._part.unlink(missing_ok=True)  # of a process that died
        self._file = open(os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b", buffering=0)  # noqa: SIM115
        self._products: dict[str, Any] = {}
        self._tensors: list[dict[str, Any]] = []
        self._size = self._num_paged = 0

    def add(self, name: str, product: T) -> T:
        """Write a product; return it with mapped tensors.

        Raises:
            TypeError: it cannot be stored.
            OSError: there is no room.
        """
        found: list[Tensor] = []
        first = len(self._tensors)

        def number_of(tensor: Tensor) -> int:
            found.append(tensor)
            return first + len(found) - 1

        index = encoded(product, number_of)
        begin = self._size = -(-self._size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._check_room(sum(tensor.nbytes for tensor in found))
        for tensor in found:
            self._append(tensor)
        self._products[name] = index
        if self._size == begin:
            return product
        mapped = _Mapping(self._file.fileno(), begin, self._size - begin)
        restored: T = decoded(index, lambda number: mapped.tensor(self._tensors[number], begin))
        assert len(self._tensors) == first + len(found)
        return restored

    def _check_room(self, num_bytes: int) -> None:
        if self._size + num_bytes > max_bytes():
            raise OSError(f"they are larger than the cache, {max_bytes() / 1e9:.1f} GB")
        if shutil.disk_usage(self._entry).free < num_bytes + LEAST_FREE:
            raise OSError(f"the disk of {str(self._entry)!r} is nearly full")

    def _append(self, tensor: Tensor) -> None:
        self._size = -(-self._size // LINE_BYTES) * LINE_BYTES
        contents = memoryview(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
        self._tensors.append(
            {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "begin": self._size,
                "digest": hashlib.sha256(contents).hexdigest(),
            }
        )
        self._write(contents)

    def _write(self, contents: bytes | memoryview) -> None:
        # Write whole pages of 2 MiB first: the kernel keeps a file in the pages that it is written in.
        while self._num_paged < self._size + len(contents):
            self._num_paged += os.pwrite(self._file.fileno(), bytes(PAGE_BYTES), self._num_paged)
        written = 0
        while written < len(contents):
            written += os.pwrite(self._file.fileno(), contents[written:], self._size + written)
        self._size += written

    def finish(self) -> None:
        """Write the index, wait for the disk and give the file its name."""
        try:
            index = {"facts": self._facts, "products": self._products, "tensors": self._tensors}
            contents = json.dumps(index).encode()
            self._write(contents)
            self._write(_END.pack(hashlib.sha256(contents).digest(), len(contents), _MAGIC))
            self._file.truncate(self._size)
            make_room(self._entry, self._size)
            os.fsync(self._file.fileno())
            self._part.rename(self._entry / "weights")
            logger.info("packed weights are kept in %s, %.1f GB", self._entry, self._size / 1e9)
        except OSError as error:
            logger.warning("packed weights are not kept: %s", error)
            self._part.unlink(missing_ok=True)
        finally:
            self._file.close()
            self._lock.close()

    def abandon(self) -> None:
        """Remove the unfinished file; mapped tensors stay valid."""
        with suppress(OSError):
            self._part.unlink(missing_ok=True)
        self._file.close()
        self._lock.close()


class _Mapping:
    """A part of a file, mapped for reading and shared with other processes."""

    def __init__(self, file: int, begin: int, num_bytes: int) -> None:
        self._memory = mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=begin)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # files have no large pages here
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # not writable: nothing writes to packed weights
            self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def read(self) -> None:
        """Read the file into memory, in large pages where the system can."""
        with suppress(OSError):
            self._memory.madvise(22)  # MADV_POPULATE_READ, which Python 3.11 does not name

    def bytes(self, begin: int, end: int) -> memoryview:
        return memoryview(self._memory)[begin:end]

    def tensor(self, header: dict[str, Any], offset: int = 0) -> Tensor:
        """Return the tensor that `header` describes; the mapping begins at `offset` of the file."""
        dtype = getattr(torch, header["dtype"])
        begin, end = (place - offset for place in _extent(header))
        if not 0 <= begin <= end <= len(self._bytes):
            raise ValueError("an array ends after the file")
        return self._bytes[begin:end].view(dtype).view(header["shape"])


def _is_whole(file: Path, header: dict[str, Any]) -> bool:
    """True if the array has its digest. It reads the file itself, so the mapping's pages stay out of memory."""
    begin, end = _extent(header)
    digest, buffer = hashlib.sha256(), memoryview(bytearray(1 << 20))
    with file.open("rb", buffering=0) as stream:
        stream.seek(begin)
        while begin < end and (length := stream.readinto(buffer[: end - begin])):
            digest.update(buffer[:length])
            begin += length
    return begin == end and digest.hexdigest() == header["digest"]


def _extent(header: dict[str, Any]) -> tuple[int, int]:
    num_bytes = torch.Size(header["shape"]).numel() * getattr(torch, header["dtype"]).itemsize
    return header["begin"], header["begin"] + num_bytes


def _read_kept(entry: Path, facts: dict[str, str]) -> dict[str, Any] | None:
    """Return the products of an entry's file; None if there is no usable file."""
    file = entry / "weights"
    try:
        return _checked(file, facts)
    except FileNotFoundError:
        return None
    except _UNUSABLE as error:
        logger.warning("the packed weights in %s are made again: %s", file, error)
        return None


def _checked(file: Path, facts: dict[str, str]) -> dict[str, Any]:
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size < _END.size:
            raise ValueError("the file is cut short")
        mapped = _Mapping(stream.fileno(), 0, size)
    digest, length, magic = _END.unpack(mapped.bytes(size - _END.size, size))
    contents = mapped.bytes(max(0, size - _END.size - length), size - _END.size)
    if magic != _MAGIC or hashlib.sha256(contents).digest() != digest:
        raise ValueError("the file is cut short, or no such file")
    index = json.loads(bytes(contents))
    if index["facts"] != facts:
        raise ValueError("it is of other weights, settings or kernels")
    tensors = index["tensors"]
    mapped.read()
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        if not all(pool.map(partial(_is_whole, file), tensors)):
            raise ValueError("an array has changed")
    return {
        name: decoded(value, lambda number: mapped.tensor(tensors[number])) for name, value in index["products"].items()
    }
