"""A model's weights as they are served: packed, kept for later starts, with the head or draft that shares them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from engine.attention.base import PlanAttention
from engine.config import HeadConfig, HeadKind, ModelConfig, Quantization
from engine.kv_cache.pool import LayerShape
from engine.model.decoders.fused_decoder import FusedDecoder
from engine.model.determinism import config_has_experts
from engine.model.draft_heads.loader import Head, HeadTarget, load_head, whole_lm_head
from engine.model.draft_heads.self_draft import SelfDraft
from engine.model.forward_batch import NO_TAPS
from engine.model.gpu_memory import WEIGHTS_REMEDY, enough_memory
from engine.model.linear.packed_experts import expert_reads
from engine.model.linear.packed_file import packed_weights
from engine.model.linear.packed_linear import Linear
from engine.model.linear.quantized_linear import check_can_quantize, linear_factory
from engine.model.linear.weight_store import NO_STORE, WeightStore
from engine.model.loader import display_name, fetched_folder, load_config, load_model, model_version, resolve_device
from engine.model.paged_model import PagedModel
from engine.model.resident_memory import leave_checkpoint, trim_heap
from engine.model.tensor_parallel import Rank
from engine.native.library import native_digest, native_instructions
from protos.errors import ConfigError

_CODE = Path(__file__).parents[2]  # it lays weights out, computes with them and compares
_INDEX = "model.safetensors.index.json"


@contextmanager
def kept_weights(
    model: ModelConfig, dtype: torch.dtype, device: torch.device, kept_as: str, *, repeats_checks: bool = False
) -> Iterator[WeightStore]:
    """Yield the store of a model's packed weights for rows of `dtype`; only processors have one.

    Args:
        model: the checkpoint and its quantization.
        dtype: of rows.
        device: of the weights.
        kept_as: names other differences between packed weights of one checkpoint.
        repeats_checks: as in `packed_weights`.

    Raises:
        ConfigError: there is no such model.
    """
    folder = fetched_folder(model.path)
    load_config(model.path)
    facts = _facts(folder, model, dtype, kept_as) if device.type == "cpu" else None
    if facts is None:
        yield NO_STORE
        return
    with packed_weights(facts, display_name(model.path), repeats_checks=repeats_checks) as store:
        yield store


def _facts(folder: Path, model: ModelConfig, dtype: torch.dtype, kept_as: str) -> dict[str, str] | None:
    """Return everything that packed weights depend on; None where a file cannot be read, which loading will report."""
    index = folder / _INDEX
    try:
        checkpoint = model_version(model.path)
        tensors = blake2b(index.read_bytes(), digest_size=16).hexdigest() if index.is_file() else ""
    except OSError:
        return None
    instructions = native_instructions()
    return {
        "checkpoint": checkpoint,
        "index": tensors,
        "quantization": Quantization(model.quantization).value,
        "dtype": str(dtype),
        "deterministic": str(model.deterministic),
        "kept as": kept_as,
        "kernels": native_digest(),
        "instructions": "none" if instructions is None else instructions.name,
        "code": _code_digest(),
        "libraries": f"torch {torch.__version__} transformers {transformers.__version__}",
    }


@cache
def _code_digest() -> str:
    digest = blake2b(digest_size=16)
    for file in sorted(_CODE.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


class ServedWeights:
    """A model whose weights are packed and checked, and its head or its draft of the same weights.

    Attributes:
        model: computes passes.
        head: drafts from the model's hidden states; None without one, and on all ranks but the first.
        head_layers: the KV that the head keeps in the model's pool.
        self_draft: the model's own weights as a draft; None if unused.
        experts: what rows read of the model's experts.
        second_head_bytes: on a GPU, the size of a head, since an exchange loads a second one.
    """

    def __init__(
        self,
        stock: PreTrainedModel,
        model: ModelConfig,
        head: HeadConfig | None,
        rank: Rank,
        dtype: torch.dtype,
        plan_attention: PlanAttention,
        store: WeightStore,
    ) -> None:
        """Pack and check `stock` and its head; no page of their files stays in memory."""
        # Copy what stays unpacked out of the mapped files.
        self.device = device = rank.device or resolve_device(model.device)
        quantization = usable_quantization(model, device)
        self.experts = expert_reads(stock)
        if device.type == "cpu":
            is_fast = rank.size == 1 and FusedDecoder.fits(stock)
            make_linear = linear_factory(quantization, dtype)
            leave_checkpoint(stock, make_linear, dtype, keeps_embeddings=is_fast, store=store)
        # Take the head, or the target's own layers, before packing takes the plain weights.
        self.head: Head | None = None
        self._head_loader: Callable[[str], Head] | None = None
        self.second_head_bytes = 0
        self.head_layers: Seq[LayerShape] = ()
        self.self_draft: SelfDraft | None = None
        taps, own_lm_head = NO_TAPS, None
        if head is not None and head.kind is HeadKind.SELF:
            self.self_draft = SelfDraft(head, stock, quantization, dtype)
        elif head is not None:
            loaded, own_lm_head = self._take_head(head, stock, rank, device, quantization)
            self.head_layers, taps = loaded.layer_shapes, loaded.taps
            self.head = loaded if rank.is_first else None
        # Pack the target; then the head and the self-draft can share its last layer.
        self.model = PagedModel(
            stock,
            quantization,
            plan_attention,
            taps,
            rank,
            dtype=dtype,
            is_deterministic=model.deterministic,
            store=store,
        )
        if self.head is not None:
            self.head.lm_head = own_lm_head or self.model.lm_head
            self.head.place(len(self.model.layer_shapes))
        if self.self_draft is not None:
            with _store_of_draft(self.self_draft, model, rank, dtype, device) as draft_store:
                self.self_draft.begin(self.model.decoder, draft_store)
        trim_heap()

    def _take_head(
        self,
        config: HeadConfig,
        stock: PreTrainedModel,
        rank: Rank,
        device: torch.device,
        quantization: Quantization,
    ) -> tuple[Head, Linear | None]:
        """Return the head, and its function to logits if it needs its own.

        Only the first rank keeps the head, unsharded, since the model's is sharded over all ranks. The other ranks need
        its taps, because all compute the same rows.
        """
        if not rank.is_first:
            return load_head(config, stock, torch.device("cpu")), None
        quantization = _head_quantization(config, quantization, device)
        if config.path is None:
            head = load_head(config, stock, device, quantization)
        else:
            self._head_loader = partial(HeadTarget.of(stock, device, quantization).load, config.kind)
            before_bytes = _allocated_bytes(device)
            head = self._head_loader(config.path)
            self.second_head_bytes = _allocated_bytes(device) - before_bytes
        return head, None if rank.size == 1 else whole_lm_head(stock, device)

    def load_head(self, path: str) -> Head:
        """Return another head for this model, which may replace `head` between two passes. Any thread may call it.

        Raises:
            ConfigError: it cannot be loaded, or the pool and the recorded passes have no room for it.
        """
        present = self.head
        assert present is not None, "it has a head to replace"
        assert self._head_loader is not None, "that is not made of the model's own weights"
        with enough_memory(self.device, f"the head {path!r}", "free memory, or deploy it by draft.path"):
            head = self._head_loader(path)
        if (head.taps, head.layer_shapes) != (present.taps, present.layer_shapes):
            raise ConfigError(
                f"it {_layout(head)}, and the pair's passes and blocks are laid out for a head that "
                f"{_layout(present)}; set draft.path in deploy.yaml and deploy again"
            )
        head.lm_head = present.lm_head
        head.place(len(self.model.layer_shapes))
        return head


def load_weights(
    model: ModelConfig,
    head: HeadConfig | None,
    rank: Rank,
    dtype: torch.dtype,
    plan_attention: PlanAttention,
    *,
    repeats_checks: bool = False,
) -> tuple[ServedWeights, PreTrainedModel]:
    """Load a model, and pack it, or map the weights that an earlier start packed. Also returns the stock model.

    Args:
        model: the checkpoint, and its device and kernels.
        head: drafts from the model's hidden states.
        rank: this process's part of the model.
        dtype: of rows.
        plan_attention: the attention of passes.
        repeats_checks: compare with the stock model even if an earlier start on this machine did.

    Raises:
        ConfigError: the model cannot be served with these settings.
    """
    device = rank.device or resolve_device(model.device)
    # Other heads compute in the dtype of their weights.
    is_alone = rank.size == 1 and (head is None or head.kind is HeadKind.SELF)
    kept_as = f"views: {is_alone}"
    with _stored(model, rank, dtype, device, kept_as, repeats_checks=repeats_checks) as store:
        stock = load_model(
            model, rank.load_device, keeps_dtype=_keeps_dtype if is_alone else None, is_checked=store.is_checked
        )
        with enough_memory(device, f"the weights of {model.path!r}, packed or sharded", WEIGHTS_REMEDY):
            return ServedWeights(stock, model, head, rank, dtype, plan_attention, store), stock


def _stored(
    model: ModelConfig,
    rank: Rank,
    dtype: torch.dtype,
    device: torch.device,
    kept_as: str,
    *,
    repeats_checks: bool = False,
) -> AbstractContextManager[WeightStore]:
    """Return the store of packed weights; the parts of several ranks are not kept."""
    if rank.size > 1:
        return nullcontext(NO_STORE)
    return kept_weights(model, dtype, device, kept_as, repeats_checks=repeats_checks)


def _store_of_draft(
    draft: SelfDraft, model: ModelConfig, rank: Rank, dtype: torch.dtype, device: torch.device
) -> AbstractContextManager[WeightStore]:
    if draft.is_shared:
        return nullcontext(NO_STORE)
    quantized = replace(model, quantization=draft.quantization)
    return _stored(quantized, rank, dtype, device, f"draft of {draft.num_layers} layers")


def _keeps_dtype(config: PreTrainedConfig) -> bool:
    """True for models whose weights are packed as the files have them: described families, and mixtures of experts."""
    return FusedDecoder.fits_config(config) or config_has_experts(config)


def usable_quantization(model: ModelConfig, device: torch.device) -> Quantization:
    """Return the configured quantization. Raises ConfigError if the device has no kernels for it."""
    quantization = Quantization(model.quantization)
    if quantization is not Quantization.NONE:
        check_can_quantize("quantization", quantization, device)
    return quantization


def _head_quantization(head: HeadConfig, of_target: Quantization, device: torch.device) -> Quantization:
    """Return the head's own quantization, or else the target's. Raises ConfigError as `usable_quantization` does."""
    own = Quantization(head.quantization)
    if not head.kind.has_own_layers or own is Quantization.NONE:
        return of_target
    check_can_quantize("draft.quantization", own, device)
    return own


def _layout(head: Head) -> str:
    layers = [f"{shape.num_kv_heads} x {shape.key_dim}" for shape in head.layer_shapes]
    inputs = f"the inputs of layers {', '.join(map(str, head.taps.layers))}" if head.taps.layers else "the last states"
    return f"reads {inputs} and keeps {f'keys of {chr(44).join(layers)}' if layers else 'no keys'}"


def _allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
