"""Medusa heads for the target of the pair (arXiv:2401.10774): training, and saving in vLLM's format."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from models.draft_heads.head_acceptance import DraftLogits
from models.training.architecture import hidden_states
from models.training.tokens import plain_positions
from tuning.student import TrainableMedusaHeads
from tuning.train import autocast


class MedusaLesson:
    """The loss of the heads against the target's distribution at the positions they predict."""

    def __init__(self, heads: TrainableMedusaHeads, target: LlamaForCausalLM, seed: int = 0) -> None:
        self._heads, self._target = heads, target
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the mean loss of all heads on windows [B, T].

        A head learns the target's distribution at the rows that it predicts.

        Each call takes one row in three, at random: the linear layer to the vocabulary takes most of the time,
        and neighbouring rows of a window teach nearly the same.
        """
        with autocast(ids.device):
            with torch.no_grad():
                hidden = hidden_states(self._target, ids, plain_positions(*ids.shape))  # [B, T, hidden]
                rows = torch.arange(self._draw(3), ids.shape[1] - self._heads.num_heads, 3)
            losses = []
            for index, states in enumerate(self._heads(hidden[:, rows])):
                with torch.no_grad():
                    probs = self._target.lm_head(hidden[:, rows + index + 1]).float().softmax(-1)  # [B, R, V]
                logits = self._target.lm_head(states).float()
                losses.append(F.cross_entropy(logits.flatten(0, 1), probs.flatten(0, 1)))
            return torch.stack(losses).mean()

    def _draw(self, bound: int) -> int:
        return int(torch.randint(0, bound, (), generator=self._generator))


def medusa_logits(heads: TrainableMedusaHeads, target: LlamaForCausalLM) -> DraftLogits:
    """Return the heads as a function of texts: head j predicts from two tokens before its j + 1 drafts."""

    def draft_logits(ids: Tensor, num_steps: int) -> Iterator[Tensor]:
        hidden = hidden_states(target, ids, plain_positions(*ids.shape))  # [B, T, hidden]
        yield from map(target.lm_head, islice(heads(hidden), num_steps))

    return draft_logits


def save_heads(heads: TrainableMedusaHeads, target: LlamaForCausalLM, folder: Path) -> None:
    """Write the heads in vLLM's format, in bfloat16, without the target's linear layer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().bfloat16().contiguous() for name, tensor in heads.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": target.config.hidden_size,
        "vocab_size": target.config.vocab_size,
        "truncated_vocab_size": target.config.vocab_size,
        "num_heads": heads.num_heads,
        "num_hidden_layers": heads.num_blocks,
        "medusa_fc_bias": True,
        "original_lm_head": True,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_heads(folder: Path, target: LlamaForCausalLM) -> TrainableMedusaHeads:
    """Return the saved heads in float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = TrainableMedusaHeads(target.config.hidden_size, config["num_heads"], config["num_hidden_layers"])
    heads.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()})
    return heads.eval()
