"""llama.cpp's converter on a checkpoint whose tokenizer it does not know. Runs as a script.

    python gguf_export.py LLAMA_CPP_SOURCE MODEL OUT.gguf bf16

The converter identifies a BPE tokenizer by a digest of its tokens for a test text, and refuses unknown ones. Prompts
and answers of the benchmark are token ids, so any splitter will do. It writes no q4_0: blocks of q8_0 become those.
"""

import runpy
import sys
from typing import Any


class _Renamed:
    """A module or class with other values for some names."""

    def __init__(self, base: Any, **others: Any) -> None:
        self._base, self._others = base, others

    def __getattr__(self, name: str) -> Any:
        return self._others[name] if name in self._others else getattr(self._base, name)


def main() -> None:
    """Run the converter with a fixed splitter."""
    source, model, out, kind = sys.argv[1:]
    sys.path[:0] = [source, f"{source}/gguf-py"]
    from conversion import base
    from conversion.llama import LlamaModel
    from conversion.qwen import Qwen2Model

    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "default"
    LlamaModel.set_vocab = Qwen2Model.set_vocab = lambda self: self._set_vocab_gpt2()
    if kind == "q4_0":
        types = base.gguf.GGMLQuantizationType
        base.gguf = _Renamed(base.gguf, GGMLQuantizationType=_Renamed(types, Q8_0=types.Q4_0))
        kind = "q8_0"
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", out, "--outtype", kind]
    runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    main()
