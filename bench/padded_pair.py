"""The pair that most benchmarks run: the demo target's logits at the cost of a large model, and the demo pair's draft.

The trained layers are spread among extra layers that add nothing (`o_proj` and `down_proj` are zero), and every MLP is
widened with units that are never read (zero columns of `down_proj`). An engine must still do all the work, so the
fixture has a large model's cost and a real pair's acceptance. It is built where it is needed and never committed.
`python -m bench.padded_pair --out DIR` pads the demo target or another Llama, as SmolLM2.
"""

from __future__ import annotations

import argparse
import copy
import logging
import shutil
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from engine.model.loader import model_version
from models.training.architecture import load_checkpoint

logger = logging.getLogger(__name__)

DEMO = Path("models/demo")
CACHE = Path(".cache/bench")


def padded_target() -> Path:
    """Return the folder of the demo target padded to 0.46 B, built under `CACHE` where it is not there yet."""
    source = DEMO / "target"
    folder = CACHE / f"padded-{model_version(str(source))[:8]}"
    if not (folder / "config.json").exists():
        build_fixture(source, folder)
    return folder


def spread(num_trained: int, num_layers: int) -> list[int | None]:
    """Return the trained layer at each place of the padded model, None for an extra one; in order, evenly spaced."""
    places: list[int | None] = [None] * num_layers
    for index in range(num_trained):
        places[index * num_layers // num_trained] = index
    return places


def pad_model(trained: LlamaForCausalLM, num_layers: int, mlp_size: int, seed: int = 0) -> LlamaForCausalLM:
    """Return a model of `num_layers` layers and MLP width `mlp_size` with the logits of `trained`, in its dtype.

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
    loaded: LlamaForCausalLM = padded.eval()
    return loaded


def plain_generation_config(model: LlamaForCausalLM) -> GenerationConfig:
    """Return the model's generation config without sampling defaults: benches of a fixture set their own."""
    config = copy.deepcopy(model.generation_config)
    config.repetition_penalty = None
    return config


def _filler_model(config: LlamaConfig, num_layers: int, mlp_size: int, seed: int) -> LlamaForCausalLM:
    padded_config = copy.deepcopy(config)
    padded_config.num_hidden_layers, padded_config.intermediate_size = num_layers, mlp_size
    padded_config.initializer_range = 0.02
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


def build_fixture(source: Path, out: Path, num_layers: int = 24, mlp_size: int = 24_576) -> None:
    """Pad the checkpoint in `source` and write it, with the tokenizer, into `out` in bfloat16."""
    padded = pad_model(load_checkpoint(source, torch.bfloat16), num_layers, mlp_size)
    padded.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).exists():
            shutil.copy(source / name, out / name)
    num_bytes = sum(parameter.nbytes for parameter in padded.parameters())
    logger.info("layers=%d mlp=%d megabytes=%.0f out=%s", num_layers, mlp_size, num_bytes / 1e6, out)


def main() -> None:
    """Build the fixture."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--source", type=Path, default=DEMO / "target", help="checkpoint to pad")
    arguments = parser.parse_args()
    build_fixture(arguments.source, arguments.out)


if __name__ == "__main__":
    main()
