"""The block of a parallel head in its config.json: its sizes, and the parts that follow a draft's neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config import HeadKind
from protos.errors import ConfigError

MASK_IDS = ("mask_token_id", "ptd_token_id", "pard_token", "dspark_noise_token_id")
_DFLASH2_SIZES = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}  # defaults


def check_size(name: str, size: Any, path: str, most: int | None = None) -> int:
    """Return a size in config.json of the head at `path`; raises ConfigError if it is no number from 1 to `most`."""
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= (size if most is None else most):
        limit = "1 or more" if most is None else f"1 to {most}"
        raise ConfigError(f"{path!r} has {name} {size!r} in config.json; it must be {limit}")
    return size


@dataclass(frozen=True, slots=True)
class BlockRefinement:
    """The additions of DFlash 2: convolutions around each sublayer within the block, a choice among likely tokens."""

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A block of a parallel head: the id in place of tokens that are not drafted yet, and its sizes.

    The first row of a block is the last committed token; its logits are of the next token if `is_anchor_drafting`.
    `refiner` is XPress's addition: the width of a network over the drafts before, and its inner width.
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
    refinement: BlockRefinement | None = None
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
        refinement=_refinement(config, num_rows, vocab_size, hidden_size, path) if is_dflash2 else None,
        refiner=_refiner(config, num_rows, path) if is_xpress else None,
    )
    if block.markov_type not in ("vanilla", "gated"):
        raise ConfigError(f"{path!r} has markov_head_type {block.markov_type!r}; computed are 'vanilla' and 'gated'")
    return block


def _refinement(
    config: Mapping[str, Any], num_rows: int, vocab_size: int, hidden_size: int, path: str
) -> BlockRefinement:
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
    return BlockRefinement(**sizes)


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
