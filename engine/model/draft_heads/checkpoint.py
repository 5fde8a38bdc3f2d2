"""A head's published files: a configuration, and tensors in safetensors or torch's own format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engine.model.checkpoint.completeness import refuse_not_finite_tensor
from engine.model.checkpoint.weight_files import file_digest
from engine.model.loader import model_version
from protos.errors import ConfigError

MASK_EMBEDDING = "mask_embedding"  # a tensor, and its file
_LOSSY_KEYS = (
    "typical_acceptance",
    "posterior_threshold",
    "posterior_alpha",
    "typical_acceptance_sampler_posterior_threshold",
    "typical_acceptance_sampler_posterior_alpha",
)


def head_folder(path: str) -> Path:
    """Return the folder of a head's files; a Hub repository is fetched.

    Raises:
        ConfigError: there is no such folder or repository.
    """
    if Path(path).expanduser().is_dir():
        return Path(path).expanduser()
    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.pt", "*.bin"]))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"draft.path {path!r} is not a local folder and cannot be fetched from the Hub: {error}"
        ) from error


def head_version(path: str) -> str:
    """Return a digest of a head's files, those in torch's own format included."""
    pickled = (f"{file.name}\0{file_digest(file)}" for file in sorted(head_folder(path).glob("*.pt")))
    return "\0".join((model_version(path), *pickled))


def read_config(folder: Path) -> dict[str, Any]:
    """Return the head's config.json; raises ConfigError if it cannot be read."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the head in {str(folder)!r} has no readable config.json: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"the head in {str(folder)!r} has no fields in config.json; fetch it again")
    _refuse_lossy(config, folder)
    return config


@contextmanager
def understood(path: str) -> Iterator[None]:
    """Read fields of the config.json of the head at `path`; raises ConfigError if one has a value of another type."""
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"config.json of the head {path!r} has a field that cannot be read: {reason}; fetch the head again"
        ) from error


def _refuse_lossy(config: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError if the checkpoint asks for an acceptance that would change the target's distribution."""
    asked = [key for key in _LOSSY_KEYS if config.get(key)]
    if asked:
        raise ConfigError(
            f"the head in {str(folder)!r} asks for lossy acceptance: config.json has {asked[0]} = "
            f"{config[asked[0]]!r}, but every draft is verified exactly; remove it from config.json"
        )


def read_tensors(folder: Path, names: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Return all tensors of the folder's weight files: safetensors, or else tensors in torch's own format.

    `names` are files in torch's format that are tried with pytorch_model.bin.

    Raises:
        ConfigError: there are no weights, or they cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    pickled = [folder / name for name in (*names, "pytorch_model.bin") if (folder / name).is_file()]
    try:
        if files:
            # Read, not mapped: one small tensor that a head keeps would keep all pages of its file.
            return {name: tensor for file in files for name, tensor in load_file(file, backend="pread").items()}
        if pickled:
            return _tensors_of(torch.load(pickled[0], map_location="cpu", weights_only=True))
    except (OSError, ValueError, RuntimeError, EOFError, UnpicklingError, SafetensorError) as error:
        raise ConfigError(f"the weights in {str(folder)!r} cannot be read: {error}") from error
    wanted = ", ".join(("*.safetensors", *names, "pytorch_model.bin"))
    raise ConfigError(f"the head in {str(folder)!r} has no weights; it needs one of {wanted}")


def read_mask_embedding(folder: Path, mask_id: int) -> dict[str, Tensor]:
    """Return the trained embedding of the mask token, [hidden], by its name; empty without such a file.

    DFlash's authors publish it next to the weights: the target's own row was never trained.

    Raises:
        ConfigError: the file cannot be read, or belongs to another token.
    """
    file = folder / f"{MASK_EMBEDDING}.pt"
    if not file.is_file():
        return {}
    try:
        contents = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, EOFError, UnpicklingError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error}") from error
    found = contents.get("embedding") if isinstance(contents, dict) else contents
    if not isinstance(found, Tensor):
        raise ConfigError(f"{str(file)!r} holds no tensor; fetch the head again")
    named_id = contents.get("mask_token_id", mask_id) if isinstance(contents, dict) else mask_id
    if named_id != mask_id:
        raise ConfigError(f"{str(file)!r} is of token {named_id}, but config.json has mask_token_id {mask_id}")
    return {MASK_EMBEDDING: found.squeeze(0) if found.dim() == 2 else found}


def _tensors_of(contents: object) -> dict[str, Tensor]:
    match contents:
        case dict() if all(isinstance(each, Tensor) for each in contents.values()):
            return {str(name): tensor for name, tensor in contents.items()}
    raise ValueError("the file does not map names to tensors")


class Weights:
    """Named tensors that must exist and have the right shape; each is taken once."""

    def __init__(self, tensors: Mapping[str, Tensor], source: str) -> None:
        """`source` names the checkpoint in errors."""
        self.source = source
        self._left = dict(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    @property
    def unused(self) -> list[str]:
        """Names of the tensors that were not taken."""
        return sorted(self._left)

    def num_rows(self, name: str) -> int | None:
        """The first dimension of a tensor; None if it does not exist."""
        tensor = self._left.get(name)
        return None if tensor is None else tensor.shape[0]

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor; raises ConfigError if it is missing, has another shape or is not finite."""
        tensor = self._left.pop(name, None)
        if tensor is None:
            raise ConfigError(f"{self.source} is incomplete: tensor {name!r} of shape {list(shape)} is missing")
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{self.source} does not fit the target: tensor {name!r} has shape {list(tensor.shape)}, but this "
                f"target needs {list(shape)}; use the head that was trained for it"
            )
        if tensor.is_floating_point() and tensor.itemsize > 1:  # eight bits cannot be compared
            refuse_not_finite_tensor(tensor, name, self.source)
        return tensor

    def take_if_there(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return the tensor, or None if it does not exist."""
        return self.take(name, shape) if name in self._left else None

    def finish(self) -> None:
        """Raise ConfigError if tensors are left: a partly understood checkpoint would draft nonsense."""
        if self._left:
            raise ConfigError(f"{self.source} has {len(self._left)} unknown tensors, {self.unused[0]!r} among them")
