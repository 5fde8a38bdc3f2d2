"""`python -m models.padded_fixture --out DIR`: the demo target at the cost of a large model, its logits unchanged.

The trained layers are spread among extra layers that add nothing (`o_proj` and `down_proj` are zero), and every MLP is
widened with units that nobody reads (zero columns of `down_proj`). An engine must still do all the work, so the fixture
has a large model's cost and a real pair's acceptance. It is built where it is needed and never committed.
"""

import argparse
import copy
import logging
import shutil
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from models.checkpoint import load_checkpoint, plain_generation_config

logger = logging.getLogger(__name__)

DEFAULT_LAYERS = 24
DEFAULT_MLP = 24_576
PADDING_STD = 0.02
DEMO_TARGET = Path(__file__).parent / "demo" / "target"


def spread(num_trained: int, num_layers: int) -> list[int | None]:
    """Which trained layer stands at each place of the padded model, None for an extra one; in order, evenly spaced."""
    places: list[int | None] = [None] * num_layers
    for index in range(num_trained):
        places[index * num_layers // num_trained] = index
    return places


def pad_model(trained: LlamaForCausalLM, num_layers: int, mlp_size: int, seed: int = 0) -> LlamaForCausalLM:
    """A model of `num_layers` layers and MLP width `mlp_size` with the logits of `trained`, in its dtype.

    Raises ValueError when the padded shape is smaller than the trained one.
    """
    config = trained.config
    if num_layers < config.num_hidden_layers or mlp_size < config.intermediate_size:
        raise ValueError(
            f"padding to {num_layers} layers and MLP {mlp_size} would cut the trained model; ask for at least "
            f"{config.num_hidden_layers} layers and MLP {config.intermediate_size}"
        )
    padded = _filler_model(config, num_layers, mlp_size, seed)
    _copy_ends(trained, padded)
    for place, index in enumerate(spread(config.num_hidden_layers, num_layers)):
        if index is not None:
            _copy_layer(trained.model.layers[index], padded.model.layers[place])
    padded.generation_config = plain_generation_config(trained)
    return padded.eval()


def _filler_model(config: LlamaConfig, num_layers: int, mlp_size: int, seed: int) -> LlamaForCausalLM:
    padded_config = copy.deepcopy(config)
    padded_config.num_hidden_layers, padded_config.intermediate_size = num_layers, mlp_size
    padded_config.initializer_range = PADDING_STD
    torch.manual_seed(seed)
    model = LlamaForCausalLM._from_config(padded_config, dtype=config.dtype)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def _copy_ends(trained: LlamaForCausalLM, padded: LlamaForCausalLM) -> None:
    padded.model.embed_tokens.load_state_dict(trained.model.embed_tokens.state_dict())
    padded.model.norm.load_state_dict(trained.model.norm.state_dict())
    padded.lm_head.load_state_dict(trained.lm_head.state_dict())


@torch.no_grad()
def _copy_layer(trained: torch.nn.Module, padded: torch.nn.Module) -> None:
    weights: dict[str, Tensor] = dict(padded.named_parameters())
    for name, weight in trained.named_parameters():
        rows, *columns = weight.shape
        corner = weights[name][:rows, : columns[0]] if columns else weights[name]
        corner.copy_(weight)


def build_fixture(source: Path, out: Path, num_layers: int, mlp_size: int, num_positions: int | None = None) -> None:
    """Pads the checkpoint in `source` and writes it, with the tokenizer, into `out` in bfloat16.

    More positions than it was trained on cost what they cost, and mean nothing; None leaves them alone.
    """
    padded = pad_model(load_checkpoint(source, torch.bfloat16), num_layers, mlp_size)
    padded.config.max_position_embeddings = num_positions or padded.config.max_position_embeddings
    padded.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, out / name)
    num_bytes = sum(parameter.nbytes for parameter in padded.parameters())
    logger.info("layers=%d mlp=%d megabytes=%.0f out=%s", num_layers, mlp_size, num_bytes / 1e6, out)


def main() -> None:
    """Builds the fixture."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--source", type=Path, default=DEMO_TARGET, help="checkpoint to pad")
    parser.add_argument("--layers", type=int, default=DEFAULT_LAYERS, help="layers after padding")
    parser.add_argument("--mlp", type=int, default=DEFAULT_MLP, help="MLP width after padding")
    arguments = parser.parse_args()
    build_fixture(arguments.source, arguments.out, arguments.layers, arguments.mlp)


if __name__ == "__main__":
    main()
