"""The time of a pass of each family per byte, relative to Llama: the numbers of the table in docs/checkpoints.md.

    python -m tests.engine.model.family_speeds              all families of the table, and those with recurrent layers
    python -m tests.engine.model.family_speeds olmoe lfm2   some

Six random layers of one shape in int4, on one thread. All experts of a mixture are active, so that every row meets
every weight. Bytes are the weights', and the states that recurrent layers read and write. A family's passes and Llama's
are timed in turn.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma4TextConfig, NemotronHConfig

from engine.attention.native import native_or_torch
from engine.batch.span import Span, SpanStates
from engine.config import Quantization
from engine.kv_cache.state_pool import state_bytes
from engine.model.checkpoint.dtype import resolve_dtype
from engine.model.forward_batch import ForwardBatch
from engine.model.linear.packed_linear import plain_linears
from engine.model.paged_model import PagedModel
from engine.sequence.sequence import ZEROS
from tests.engine.fixtures.hybrids import HYBRIDS
from tests.engine.model.test_more_families import FAMILIES, WITHOUT_HEAD_DIM, sized

NUM_LAYERS = 6
NUM_ROUNDS = 7
PROMPT = 128
NUM_PASSES = {1: 12, 8: 6, PROMPT: 1}  # of a round, by rows: sequences, or tokens of a prompt
CONTEXT = 64  # tokens before a row, except in a prompt
WITHOUT_GATES = ("apertus", "arcee", "biogpt", "ctrl", "gpt2", "gpt_neox", "jais2", "nanochat", "nemotron", "opt")
WITHOUT_GATES += ("persimmon", "phi", "starcoder2")
OURS: dict[str, int | None] = {
    **dict.fromkeys(("vocab_size", "intermediate_size", "n_inner", "ffn_dim", "dff", "max_position_embeddings"), 4096),
    **dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim", "moe_intermediate_size"), 1024),
    **dict.fromkeys(("shared_expert_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size"), 1024),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), NUM_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "mamba_num_heads", "linear_num_value_heads"), 16),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads"), 8),
    **dict.fromkeys(("head_dim", "query_pre_attn_scalar", "qk_nope_head_dim", "v_head_dim", "mamba_d_head"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_top_k", "moe_topk"), 4),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "linear_key_head_dim"), 128),
    **dict.fromkeys(("linear_value_head_dim", "mamba_head_dim"), 128),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 512),
    **{"first_k_dense_replace": 0, "num_dense_layers": 0, "qk_rope_head_dim": 64, "qk_head_dim": 128},
    **{"mamba_n_heads": 32, "num_heads": 32, "mamba_d_ssm": 2048, "sliding_window": 1024, "n_positions": 4096},
}


_GEMMA_4 = {  # whose heads differ by layer, so that it takes all sizes at once
    **{"vocab_size": 4096, "intermediate_size": 4096, "hidden_size": 1024, "num_hidden_layers": NUM_LAYERS},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "global_head_dim": 64},
    **{"max_position_embeddings": 4096, "sliding_window": 1024, "pad_token_id": None},
    "layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2),
}
_NEMOTRON = {
    **{"vocab_size": 4096, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64},
    **{"mamba_num_heads": 16, "mamba_head_dim": 128, "ssm_state_size": 128, "n_groups": 1, "pad_token_id": None},
    **{"n_routed_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 1536},
    **{"moe_shared_expert_intermediate_size": 1536, "max_position_embeddings": 4096},
    "layers_block_type": ["mamba", "moe", "mamba", "moe", "attention", "moe"],
}
# Configurations of one family with other parts than its own, by the name of the row.
SHAPES: dict[str, Callable[[], Any]] = {
    "gemma4_text": lambda: Gemma4TextConfig(**_GEMMA_4, hidden_size_per_layer_input=0),
    "gemma4_text of E2B": lambda: Gemma4TextConfig(
        **_GEMMA_4, vocab_size_per_layer_input=4096, num_kv_shared_layers=4, use_double_wide_mlp=True
    ),
    "gemma4_text of A4B": lambda: Gemma4TextConfig(
        **_GEMMA_4 | {"intermediate_size": 1024},
        **{"hidden_size_per_layer_input": 0, "enable_moe_block": True},
        **{"num_experts": 4, "top_k_experts": 4, "moe_intermediate_size": 1024},
    ),
    "nemotron_h with experts": lambda: NemotronHConfig(**_NEMOTRON),
    "nemotron_h with experts in a latent space": lambda: NemotronHConfig(**_NEMOTRON, moe_latent_size=512),
}


def has_experts(config: Any) -> bool:
    return any(hasattr(config, name) for name in ("num_experts_per_tok", "moe_k", "moe_topk"))


def config_of(family: str) -> Any:
    """Return a configuration of the common shape, with the kinds of layers that the family has."""
    if family in SHAPES:
        shaped: Any = SHAPES[family]()
        shaped.tie_word_embeddings = False
        return shaped
    sizes_of_heads = {"head_dim": OURS["head_dim"]} if family in WITHOUT_HEAD_DIM else {}
    own = HYBRIDS[family]() if family in HYBRIDS else AutoConfig.for_model(family, **sizes_of_heads)
    sizes = dict(OURS)
    if family in WITHOUT_GATES:
        sizes |= dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 6144)
    elif has_experts(own) and not hasattr(own, "moe_intermediate_size"):
        sizes["intermediate_size"] = 1024  # of an expert
    if family == "phimoe":  # a row has two experts, whatever its configuration has
        sizes |= {"num_local_experts": 2, "intermediate_size": 2048}
    config: Any = sized(own, sizes)
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) < NUM_LAYERS and name.endswith(("types", "type")):
            setattr(config, name, [*value, *value][:NUM_LAYERS])
    config.tie_word_embeddings, config.pad_token_id = False, None
    return config


class Passes:
    """A family's model and its passes by number of rows."""

    def __init__(self, family: str) -> None:
        torch.manual_seed(0)
        dtype = resolve_dtype("auto", torch.device("cpu"))
        model: Any = AutoModelForCausalLM.from_config(config_of(family), dtype=dtype, attn_implementation="eager")
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.02)
        plain_linears(model)
        embeddings = {id(each.weight) for each in model.modules() if isinstance(each, torch.nn.Embedding)}
        weights = [each for each in model.parameters() if each.ndim > 1 and id(each) not in embeddings]
        self.num_weights = sum(each.numel() for each in weights)
        self._dtype = dtype
        self._paged = PagedModel(model.eval().requires_grad_(False), Quantization.INT4, native_or_torch)
        self._cache = self._paged.new_cache(num_blocks=48, block_size=16, num_states=20)
        self._batches = {rows: self._batch(rows) for rows in NUM_PASSES}
        self.decoder = type(self._paged.decoder).__name__

    def _batch(self, num_rows: int) -> ForwardBatch:
        if num_rows == PROMPT:
            states = SpanStates(ZEROS, {num_rows: 1})
            spans = [Span(list(range(3, 3 + num_rows)), 0, list(range(8)), 1, states=states)]
        else:
            spans = [
                Span(
                    [3 + row], CONTEXT, list(range(5 * row, 5 * row + 5)), 1, states=SpanStates(2 + row, {1: 11 + row})
                )
                for row in range(num_rows)
            ]
        return ForwardBatch.of(spans, self._cache, native_or_torch)

    def num_bytes(self, num_rows: int) -> float:
        """Return the bytes of weights and states of a pass."""
        states = 2 * state_bytes(self._paged.state_shapes, self._dtype)  # read and written
        return 4.5 / 8 * self.num_weights + states * (num_rows if num_rows < PROMPT else 1)

    def seconds(self, num_rows: int) -> float:
        """Return the processor time of one pass."""
        began_s = time.process_time()
        for _ in range(NUM_PASSES[num_rows]):
            self._paged.forward(self._batches[num_rows])
        return (time.process_time() - began_s) / NUM_PASSES[num_rows]


def ratios(family: Passes, llama: Passes) -> list[float]:
    """Return a family's time per byte by number of rows, Llama = 1: medians over rounds."""
    found: dict[int, list[float]] = {rows: [] for rows in NUM_PASSES}
    for each in (family, llama):
        for rows in NUM_PASSES:
            each.seconds(rows)
    for _ in range(NUM_ROUNDS):
        for rows in NUM_PASSES:
            before, own, after = (each.seconds(rows) for each in (llama, family, llama))
            found[rows].append(2 * own / (before + after))
    return [statistics.median(each) * llama.num_bytes(rows) / family.num_bytes(rows) for rows, each in found.items()]


def main(names: Seq[str], write: Callable[[str], Any] = sys.stdout.write) -> None:
    """Print a line for every family."""
    torch.set_num_threads(1)
    llama = Passes("llama")
    for name in names:
        family = Passes(name)
        numbers = ", ".join(f"{ratio:.2f}" for ratio in ratios(family, llama))
        write(f"{name} ({family.decoder}, {family.num_weights / llama.num_weights:.2f} of the weights): {numbers}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:] or list(dict.fromkeys((*FAMILIES, *SHAPES, *HYBRIDS))))
