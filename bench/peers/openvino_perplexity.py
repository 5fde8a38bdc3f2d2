"""Perplexity of an exported model by OpenVINO itself, for `bench.steps.perplexity`; runs in OpenVINO's environment.

Takes JSON on standard input: `model`, a folder, and `windows`, lists of token ids that are read together. Prints the
perplexity, each token predicted from those before it in its window.
"""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import openvino

SETTINGS = {"INFERENCE_NUM_THREADS": 2, "INFERENCE_PRECISION_HINT": "bf16"}  # as `make bench-peers` serves it


def main() -> None:
    """Read all windows; each starts from an empty cache."""
    asked = json.load(sys.stdin)
    compiled = openvino.Core().compile_model(f"{asked['model']}/openvino_model.xml", "CPU", SETTINGS)
    request = compiled.create_infer_request()
    loss, num_predicted = 0.0, 0
    for ids in asked["windows"]:
        request.reset_state()
        row = np.array([ids], dtype=np.int64)
        inputs = {"input_ids": row, "attention_mask": np.ones_like(row), "position_ids": np.arange(len(ids))[None]}
        request.infer({**inputs, "beam_idx": np.zeros(1, dtype=np.int32)})
        logits = request.get_tensor("logits").data[0, :-1].astype(np.float64)
        highest = logits.max(axis=1)
        totals = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1))
        loss += float((totals - logits[np.arange(len(ids) - 1), ids[1:]]).sum())
        num_predicted += len(ids) - 1
    print(math.exp(loss / num_predicted))


if __name__ == "__main__":
    main()
