"""Medusa heads for the target of the pair (arXiv:2401.10774): training, saving in vLLM's format, acceptance."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from models.demo_pair.evaluate import Acceptance, summarise
from models.training.architecture import hidden_states
from models.training.tokens import plain_positions
from tuning.score import choose, generate
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


@torch.no_grad()
def measure_heads(
    target: LlamaForCausalLM,
    heads: TrainableMedusaHeads,
    prompts: Tensor,
    temperature: float,
    num_tokens: int,
    seed: int = 0,
) -> Acceptance:
    """Acceptance of chains of all heads over continuations of prompts [B, S], as `measure_acceptance` for a draft."""
    ids = generate(target, prompts, num_tokens, temperature, seed)
    agrees = agreement(target, heads, ids, prompts.shape[1], temperature, seed)  # [H, B, generated]
    accepted = [run for row in range(len(ids)) for run in count_rounds(agrees[:, row].tolist())]
    return summarise(accepted, agrees[0], ids[:, prompts.shape[1] :], heads.num_heads)


def agreement(
    target: LlamaForCausalLM,
    heads: TrainableMedusaHeads,
    ids: Tensor,
    num_prompt_tokens: int,
    temperature: float,
    seed: int,
) -> Tensor:
    """Mark where head h chose the target's token, [H, B, generated].

    The head predicts from h + 2 tokens earlier; positions without such a row in the text count as missed.
    """
    hidden = hidden_states(target, ids, plain_positions(*ids.shape))  # [B, S + generated, hidden]
    agrees = torch.zeros(heads.num_heads, len(ids), ids.shape[1] - num_prompt_tokens, dtype=torch.bool)
    for head, states in enumerate(heads(hidden)):
        for place in range(num_prompt_tokens, ids.shape[1]):
            if place >= head + 2:
                logits = target.lm_head(states[:, place - head - 2]).float()  # [B, V]
                agrees[head, :, place - num_prompt_tokens] = choose(logits, temperature, seed, place) == ids[:, place]
    return agrees


def count_rounds(agrees: list[list[bool]]) -> list[int]:
    """Return the accepted tokens of each round along `agrees` [H][generated]; draft j of a round is head j's.

    The round at `cursor` drafts the tokens from there on, and one token of the target ends it. A round that the end of
    the text cuts is left out.
    """
    num_heads, num_places = len(agrees), len(agrees[0])
    accepted, cursor = [], 1
    while cursor + num_heads <= num_places:
        run = 0
        while run < num_heads and agrees[run][cursor + run]:
            run += 1
        accepted.append(run)
        cursor += run + 1
    return accepted


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
