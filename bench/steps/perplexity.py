"""The price of fewer bits: perplexity of one model in every kind of weights, on the same tokens of the same texts.

python -m bench.steps.perplexity --text docs/architecture.md README.md --tokens 4096 --gguf MODEL.gguf \
    --openvino .cache/peers/models/*openvino*

A GGUF file stands for its numbers in float32, as llama.cpp reads its weights; the rows that meet them are not rounded.
Models that `make bench-peers` has exported are read by OpenVINO itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import Tokenizer

from bench.padded_pair import SMOLLM2
from bench.peers import install
from engine.config import CacheConfig, KVDtype, ModelConfig, ModelDtype, Quantization
from engine.model.checkpoint.gguf import convert_gguf
from engine.model.checkpoint.gguf_header import read_gguf_header
from engine.model.runner.model_runner import ModelRunner
from engine.model.runner.perplexity import WINDOW, perplexity

OPENVINO_PERPLEXITY = Path(install.__file__).parent / "openvino_perplexity.py"


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to keep a model's weights, and its keys and values."""

    name: str
    dtype: ModelDtype
    weights: Quantization = Quantization.NONE
    kv: KVDtype = KVDtype.AUTO


def kinds_of(dtype: ModelDtype) -> list[Kind]:
    """Return those to compare, the first of them with the weights as they are."""
    full = [Kind(name, name) for name in dict.fromkeys((dtype, ModelDtype.FLOAT32))]
    weights = (("int8", Quantization.INT8), ("int4, the head int8", Quantization.INT4))
    quantized = [Kind(name, dtype, kind) for name, kind in weights]
    return full + quantized + [replace(kind, name=f"{kind.name}, KV int8", kv=KVDtype.INT8) for kind in quantized]


def main() -> None:
    """Print a table whose first row is what the others are compared with."""
    args = _parse_args()
    torch.set_num_threads(args.threads)
    token_ids = _token_ids(args.model, args.text, args.tokens)
    print(f"{args.model.name}, {len(token_ids)} tokens of {len(args.text)} texts, read {WINDOW} at a time\n")
    print(f"| weights | perplexity | over {args.dtype} |\n|---|---|---|")
    first = None
    for name, value in _measured(args.model, kinds_of(args.dtype), args.gguf, args.openvino, token_ids):
        first = first or value
        print(f"| {name} | {value:.3f} | {value / first - 1:+.2%} |", flush=True)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="folder of a model; `make real-model` has made it")
    dtypes = ModelDtype.BFLOAT16, ModelDtype.FLOAT32
    parser.add_argument("--dtype", type=ModelDtype, choices=dtypes, default=dtypes[0], help="numbers of the rows")
    parser.add_argument("--gguf", type=Path, help="the same model as a GGUF file")
    parser.add_argument("--openvino", type=Path, nargs="+", default=[], help="folders of the same model for OpenVINO")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="files of text that was not trained on")
    parser.add_argument("--tokens", type=int, default=4096, help="at most so many, an equal part of each text")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def _token_ids(model: Path, texts: list[Path], num_tokens: int) -> list[int]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    share = -(-num_tokens // len(texts))
    encoded = (tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False).ids for text in texts)
    return [token_id for ids in encoded for token_id in ids[:share]][:num_tokens]


def _measured(
    model: Path,
    kinds: list[Kind],
    gguf: Path | None,
    exported: list[Path],
    token_ids: list[int],
) -> Iterator[tuple[str, float]]:
    for kind in kinds:
        yield kind.name, _perplexity(ModelConfig(str(model), kind.dtype, quantization=kind.weights), token_ids, kind.kv)
    if gguf is not None:
        types = sorted({tensor.type for tensor in read_gguf_header(gguf).tensors})
        with TemporaryDirectory() as folder:
            convert_gguf(gguf, Path(folder), torch.float32)
            value = _perplexity(ModelConfig(folder, ModelDtype.FLOAT32), token_ids)
        yield f"{gguf.name} ({', '.join(types)})", value
    for each in exported:
        yield each.name, _openvino_perplexity(each, token_ids)


def _perplexity(model: ModelConfig, token_ids: list[int], kv: KVDtype = KVDtype.AUTO) -> float:
    cache = CacheConfig(num_blocks=-(-WINDOW // CacheConfig().block_size), dtype=kv)
    return perplexity(ModelRunner(model, cache), token_ids)


def _openvino_perplexity(folder: Path, token_ids: list[int]) -> float:
    windows = [token_ids[start : start + WINDOW] for start in range(0, len(token_ids) - 1, WINDOW)]
    programs = install.install_openvino(Path(".cache/peers"))
    asked = json.dumps({"model": str(folder), "windows": [window for window in windows if len(window) > 1]})
    command = [str(programs / "python"), str(OPENVINO_PERPLEXITY)]
    return float(subprocess.run(command, input=asked, stdout=subprocess.PIPE, text=True, check=True).stdout)


if __name__ == "__main__":
    main()
