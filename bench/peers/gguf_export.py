"""llama.cpp's converter on a checkpoint whose tokenizer it does not know. Runs as a script.

    python gguf_export.py LLAMA_CPP_SOURCE MODEL OUT.gguf bf16

The converter identifies a BPE tokenizer by a digest of its tokens for a test text, and refuses unknown ones. Prompts
and answers of the benchmark are token ids, so any splitter will do.
"""

import runpy
import sys


def main() -> None:
    """Run the converter with a fixed splitter."""
    source, model, out, kind = sys.argv[1:]
    sys.path[:0] = [source, f"{source}/gguf-py"]
    from conversion.base import TextModel
    from conversion.llama import LlamaModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "default"
    LlamaModel.set_vocab = lambda self: self._set_vocab_gpt2()
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", out, "--outtype", kind]
    runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    main()
