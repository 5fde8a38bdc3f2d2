"""A head's published files: a configuration, and tensors in safetensors or torch's own format.

A parallel head's configuration has a block: its sizes, and the parts that follow a draft's neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engine.config import HeadKind
from engine.model.checkpoint.completeness import refuse_not_finite_tensor
from engine.model.checkpoint.weight_files import file_digest
from engine.model.loader import model_version
from protos.errors import ConfigError

MASK_EMBEDDING = "mask_embedding"  # a tensor, and its file
MASK_IDS = ("mask_token_id", "ptd_token_id", "pard_token", "dspark_noise_token_id")
_DFLASH2_SIZES = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}  # defaults
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


def check_size(name: str, size: Any, path: str, most: int | None = None) -> int:
    """Return a size in config.json of the head at `path`; raises ConfigError if it is no number from 1 to `most`."""
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= (size if most is None else most):
        limit = "1 or more" if most is None else f"1 to {most}"
        raise ConfigError(f"{path!r} has {name} {size!r} in config.json; it must be {limit}")
    return size


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A block of a parallel head: the id in place of tokens that are not drafted yet, and its sizes.

    The first row of a block is the last committed token; its logits are of the next token if `is_anchor_drafting`.
    DFlash 2 adds convolutions around each sublayer within the block, and a choice among likely tokens. Its sizes, named
    `conv_*` and `selector_*`, are 0 in other heads. `refiner` is XPress's addition: the width of a network over the
    drafts before, and its inner width.
    """

    mask_id: int
    num_rows: int = 0
    is_anchor_drafting: bool = False
    markov_rank: int = 0
    markov_type: str = "vanilla"
    has_confidence: bool = False
    has_markov_confidence: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    refiner: tuple[int, int] | None = None


def read_block(
    kind: HeadKind,
    config: Mapping[str, Any],
    vocab_size: int,
    hidden_size: int,
    path: str,
    *,
    is_speculators: bool,
    is_dflash2: bool,
    is_xpress: bool,
) -> BlockFormat:
    """Return the block of `config`, the fields of the head's config.json and of the method's section.

    `path` names the head in errors. Defaults of speculators' layout differ from the authors'.

    Raises:
        ConfigError: a field is missing or not supported.
    """
    mask_id = next((config[name] for name in MASK_IDS if name in config), None)
    if not isinstance(mask_id, int) or not 0 <= mask_id < vocab_size:
        raise ConfigError(
            f"{path!r} has mask_token_id {mask_id!r} in config.json; it must be one of the target's {vocab_size} ids"
        )
    if kind is HeadKind.PEAGLE:
        return BlockFormat(mask_id)
    is_dspark = kind is HeadKind.DSPARK
    num_rows = config.get("block_size", 8 if is_speculators else 16)
    if not isinstance(num_rows, int) or num_rows < 2:
        raise ConfigError(f"{path!r} has block_size {num_rows!r} in config.json; it must be 2 or more")
    block = BlockFormat(
        mask_id,
        num_rows,
        bool(config.get("sample_from_anchor", is_dspark and not config.get("dspark_bonus_anchor"))),
        markov_rank=int(config.get("markov_rank", 256)) if is_dspark else 0,
        markov_type=config.get("markov_head_type", "vanilla"),
        has_confidence=is_dspark and bool(config.get("enable_confidence_head", is_speculators)),
        has_markov_confidence=bool(config.get("confidence_head_with_markov", is_speculators)),
        embedding_scale=float(config.get("input_embedding_scale", 1.0)),
        logit_scale=float(config.get("output_multiplier", 1.0)),
        logit_softcap=config.get("final_logit_softcapping") or None,
        refiner=_refiner(config, num_rows, path) if is_xpress else None,
        **(_dflash2_sizes(config, num_rows, vocab_size, hidden_size, path) if is_dflash2 else {}),
    )
    if block.markov_type not in ("vanilla", "gated"):
        raise ConfigError(f"{path!r} has markov_head_type {block.markov_type!r}; computed are 'vanilla' and 'gated'")
    return block


def _dflash2_sizes(
    config: Mapping[str, Any], num_rows: int, vocab_size: int, hidden_size: int, path: str
) -> dict[str, int]:
    sizes = {name: config.get(name, usual) for name, usual in _DFLASH2_SIZES.items()}
    most = {"conv_kernel_size": num_rows, "conv_group_size": hidden_size, "selector_top_k": vocab_size}
    for name, size in sizes.items():
        check_size(name, size, path, most.get(name))
    if hidden_size % sizes["conv_group_size"]:
        raise ConfigError(
            f"{path!r} has conv_group_size {sizes['conv_group_size']} in config.json, which does not divide "
            f"its hidden size {hidden_size}"
        )
    drafted = config.get("draft_vocab_size") or vocab_size
    if drafted != vocab_size:
        raise ConfigError(
            f"{path!r} is a DFlash 2 head with draft_vocab_size {drafted}; only the target's whole "
            f"vocabulary of {vocab_size} tokens is computed"
        )
    return sizes


def _refiner(config: Mapping[str, Any], num_rows: int, path: str) -> tuple[int, int]:
    rank = config.get("xpress_rank", 256)
    check_size("xpress_rank", rank, path)
    ratio = config.get("xpress_mlp_ratio", 2)
    check_size("xpress_mlp_ratio", ratio, path)
    inner_size = config.get("xpress_mlp_hidden", rank * ratio)
    check_size("xpress_mlp_hidden", inner_size, path)
    mixed = config.get("xpress_block_size", num_rows)
    if mixed != num_rows:
        raise ConfigError(
            f"{path!r} has xpress_block_size {mixed!r} and block_size {num_rows} in config.json; only equal "
            "sizes are computed"
        )
    return rank, inner_size
