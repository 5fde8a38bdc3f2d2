"""`python -m models.training.card`: fill card.template.md with the records of training and measuring."""

import argparse
import json
from pathlib import Path
from typing import Any

from models.training.architecture import REPETITION_PENALTY

DEMO_FOLDER = Path(__file__).parents[1] / "demo"

TEMPLATE = Path(__file__).parent / "card.template.md"


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def acceptance_table(acceptance: dict[str, dict[str, Any]]) -> str:
    """Return one row per way to sample: the chance at each position, tokens per pass, plain agreement."""
    num_positions = len(next(iter(acceptance.values()))["by_position"])
    columns = [
        "temperature",
        *(str(position + 1) for position in range(num_positions)),
        f"tokens per pass (K = {num_positions})",
        "plain agreement",
        "repetition",
        "rounds",
    ]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for sampling, measured in acceptance.items():
        chances = " | ".join(f"{chance:.3f}" for chance in measured["by_position"])
        quality = f"{measured['tokens_per_pass']:.2f} | {measured['per_token']:.3f} | {measured['repetition']:.2f}"
        lines.append(f"| {sampling} | {chances} | {quality} | {measured['num_rounds']} |")
    return "\n".join(lines)


def context_table(losses: dict[str, float]) -> str:
    """Return one column per range of positions."""
    header, values = " | ".join(losses), " | ".join(f"{loss:.3f}" for loss in losses.values())
    return f"| position | {header} |\n{'|---' * (len(losses) + 1)}|\n| loss | {values} |"


def sample_blocks(samples: list[dict[str, str]]) -> str:
    """Return each prompt and its completion as one fenced block, a rule between the two."""
    return "\n\n".join(f"````text\n{sample['prompt']}⟦{sample['completion']}⟧\n````" for sample in samples)


def half_fields(folder: Path, half: str) -> dict[str, Any]:
    """Return the template's fields that describe the target or the draft."""
    config, training = read_json(folder / half / "config.json"), read_json(folder / half / "training.json")
    return {
        f"{half}_layers": config["num_hidden_layers"],
        f"{half}_width": config["hidden_size"],
        f"{half}_heads": config["num_attention_heads"],
        f"{half}_kv_heads": config["num_key_value_heads"],
        f"{half}_megabytes": (folder / half / "model.safetensors").stat().st_size / 1e6,
        f"{half}_tokens": training["num_tokens"] / 1e6,
        f"{half}_steps": training["num_steps"],
        f"{half}_minutes": training["seconds"] / 60,
    }


def condition_line(folder: Path, half: str) -> str:
    """Return the command and the machine that made one half."""
    training = read_json(folder / half / "training.json")
    rate = training["num_tokens"] / training["seconds"]
    command = f"python -m models.training.train_demo_pair {training['arguments']}".strip()
    return f"- {half}: `{command}`, {training['machine']}, {rate:,.0f} tokens per second"


def render_card(folder: Path) -> str:
    """Return the model card of the pair in `folder`; needs training.json in both halves and measurements.json."""
    measured, training = read_json(folder / "measurements.json"), read_json(folder / "target" / "training.json")
    losses = measured["losses"]
    return TEMPLATE.read_text(encoding="utf-8").format(
        **half_fields(folder, "target"),
        **half_fields(folder, "draft"),
        target_parameters=measured["target_parameters"] / 1e6,
        draft_parameters=measured["draft_parameters"] / 1e6,
        target_loss=losses["target, library"],
        draft_loss=losses["draft, library"],
        target_test_loss=losses["target, tests"],
        draft_test_loss=losses["draft, tests"],
        num_prompts=measured["num_prompts"],
        text_agreement=measured["text_agreement"],
        acceptance=acceptance_table(measured["acceptance"]),
        penalty=REPETITION_PENALTY,
        contexts=context_table(measured["loss_by_context"]),
        num_training=measured["num_training_files"],
        num_held_out=measured["num_held_out_files"],
        python=measured["python"],
        long_window=training["long_window_tokens"],
        conditions="\n".join(condition_line(folder, half) for half in ("target", "draft")),
        sample_tokens=measured["sample_tokens"],
        samples=sample_blocks(measured["samples"]),
    )


def write_card(folder: Path) -> None:
    """Write README.md into the pair's folder."""
    (folder / "README.md").write_text(render_card(folder), encoding="utf-8")


def main() -> None:
    """Write the card of a pair that is trained and measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=DEMO_FOLDER)
    write_card(parser.parse_args().folder)


if __name__ == "__main__":
    main()
