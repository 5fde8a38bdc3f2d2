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
class BlockRefiner:
    """The addition of XPress: a network of width `rank` over the drafts before, whose inner width is `inner_size`."""

    rank: int
    inner_size: int


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A block of a parallel head: the id in place of tokens that are not drafted yet, and its sizes.

    The first row of a block is the last committed token; its logits are of the next token if `is_anchor_drafting`.
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
    refiner: BlockRefiner | None = None


@dataclass(frozen=True, slots=True)
class BlockReader:
    """Reads the block's part of one config.json.

    Attributes:
        config: its fields, with the fields of the method's section.
        is_speculators: the layout is speculators', whose defaults differ from the authors'.
        is_dflash2: the head is a DFlash 2.
        is_xpress: the head is an XPress.
        path: names the head in errors.
    """

    kind: HeadKind
    config: Mapping[str, Any]
    vocab_size: int
    hidden_size: int
    is_speculators: bool
    is_dflash2: bool
    is_xpress: bool
    path: str

    def read(self) -> BlockFormat:
        """Return the block.

        Raises:
            ConfigError: a field is missing or not supported.
        """
        mask_id = next((self.config[name] for name in MASK_IDS if name in self.config), None)
        if not isinstance(mask_id, int) or not 0 <= mask_id < self.vocab_size:
            raise ConfigError(
                f"{self.path!r} has mask_token_id {mask_id!r} in config.json; it must be one of the target's "
                f"{self.vocab_size} ids"
            )
        if self.kind is HeadKind.PEAGLE:
            return BlockFormat(mask_id)
        is_dspark = self.kind is HeadKind.DSPARK
        num_rows = self._num_rows()
        anchors = self.config.get("sample_from_anchor", is_dspark and not self.config.get("dspark_bonus_anchor"))
        block = BlockFormat(
            mask_id,
            num_rows,
            bool(anchors),
            markov_rank=int(self.config.get("markov_rank", 256)) if is_dspark else 0,
            markov_type=self.config.get("markov_head_type", "vanilla"),
            has_confidence=is_dspark and bool(self.config.get("enable_confidence_head", self.is_speculators)),
            has_markov_confidence=bool(self.config.get("confidence_head_with_markov", self.is_speculators)),
            embedding_scale=float(self.config.get("input_embedding_scale", 1.0)),
            logit_scale=float(self.config.get("output_multiplier", 1.0)),
            logit_softcap=self.config.get("final_logit_softcapping") or None,
            refinement=self._refinement(num_rows) if self.is_dflash2 else None,
            refiner=self._refiner(num_rows) if self.is_xpress else None,
        )
        if block.markov_type not in ("vanilla", "gated"):
            raise ConfigError(
                f"{self.path!r} has markov_head_type {block.markov_type!r}; computed are 'vanilla' and 'gated'"
            )
        return block

    def _num_rows(self) -> int:
        num_rows = self.config.get("block_size", 8 if self.is_speculators else 16)
        if not isinstance(num_rows, int) or num_rows < 2:
            raise ConfigError(f"{self.path!r} has block_size {num_rows!r} in config.json; it must be 2 or more")
        return num_rows

    def _refinement(self, num_rows: int) -> BlockRefinement:
        sizes = {name: self.config.get(name, usual) for name, usual in _DFLASH2_SIZES.items()}
        most = {"conv_kernel_size": num_rows, "conv_group_size": self.hidden_size, "selector_top_k": self.vocab_size}
        for name, size in sizes.items():
            check_size(name, size, self.path, most.get(name))
        if self.hidden_size % sizes["conv_group_size"]:
            raise ConfigError(
                f"{self.path!r} has conv_group_size {sizes['conv_group_size']} in config.json, which does not divide "
                f"its hidden size {self.hidden_size}"
            )
        drafted = self.config.get("draft_vocab_size") or self.vocab_size
        if drafted != self.vocab_size:
            raise ConfigError(
                f"{self.path!r} is a DFlash 2 head with draft_vocab_size {drafted}; only the target's whole "
                f"vocabulary of {self.vocab_size} tokens is computed"
            )
        return BlockRefinement(**sizes)

    def _refiner(self, num_rows: int) -> BlockRefiner:
        rank = self.config.get("xpress_rank", 256)
        check_size("xpress_rank", rank, self.path)
        ratio = self.config.get("xpress_mlp_ratio", 2)
        check_size("xpress_mlp_ratio", ratio, self.path)
        inner_size = self.config.get("xpress_mlp_hidden", rank * ratio)
        check_size("xpress_mlp_hidden", inner_size, self.path)
        mixed = self.config.get("xpress_block_size", num_rows)
        if mixed != num_rows:
            raise ConfigError(
                f"{self.path!r} has xpress_block_size {mixed!r} and block_size {num_rows} in config.json; only equal "
                "sizes are computed"
            )
        return BlockRefiner(rank, inner_size)
