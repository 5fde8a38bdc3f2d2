"""`outrider try`: finds the fastest draft, K and verification for a user's traffic on this machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Annotated

from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

from cluster.checkpoints import resolve_model_path
from cluster.cli import console, numbers_in, report, write_text
from cluster.cli.child_process import in_child
from cluster.cli.deployment import BUNDLED, SetOptions, deployment_of, to_yaml
from cluster.cli.replay_traffic import DraftTrial, TrafficRequest, TrialFigures, read_traffic, run_trial
from cluster.planning.replica_plan import PlannedDraft, ReplicaPlan, replayed_speed_up
from cluster.planning.roofline import DeviceSpec, ModelShape
from protos.errors import ConfigError, RequestError, ServingError
from protos.messages import SpeculationMethod, VerifyMode

_WORTH = 1.03  # the least speedup that is recommended
_OF_TARGET = ("self", "mtp")  # drafts of the target's own weights
_OF_TEXT = ("suffix", "ngram", "none")  # drafts that cost nothing


def try_drafts(
    target: Annotated[str, Argument(metavar="TARGET", help="a folder, a .gguf file, a Hub id, demo or smollm2")],
    traffic: Annotated[Path, Option(metavar="log.jsonl", help="OpenAI requests, one JSON object per line")],
    drafts: Annotated[str, Option(help="drafts to compare: folders or Hub ids, suffix, ngram, self, mtp")] = "suffix",
    lengths: Annotated[str, Option(help="numbers of drafts (K) to compare")] = "2,4,8",
    verify: Annotated[str, Option(help="verification modes to compare: coupled, rejection, block")] = "coupled",
    streams: Annotated[str, Option(help="numbers of concurrent requests")] = "1,8,32",
    max_requests: Annotated[int, Option(min=1, help="requests of the log to replay")] = 64,
    max_tokens: Annotated[int, Option(min=1, help="longest answer")] = 64,
    rounds: Annotated[int, Option(min=1, help="rounds over all variants; results are medians")] = 3,
    hardware: Annotated[str | None, Option(help="also predict the speed-up on this device of `outrider plan`")] = None,
    output: Annotated[Path | None, Option(help="write the deploy.yaml to this file; default: print it")] = None,
    settings: SetOptions = None,
) -> None:
    """Replay a log of requests with each draft, K and verification, and report the fastest."""
    # Refuse wrong options before anything is loaded.
    requests = read_traffic(traffic, max_requests, max_tokens)
    modes = _one_of(verify, [str(mode) for mode in VerifyMode], "--verify")
    names = [name.strip() for name in drafts.split(",") if name.strip()]
    chosen = tuple(settings or ())
    planned = _planner(target, names, hardware)
    # Measure each draft in a deployment of its own.
    counts = _fitting(_numbers(streams, "--streams"), requests)
    measured: list[TrialFigures] = []
    for name in names:
        trial = DraftTrial(
            draft=name,
            deployment=deployment_of(target, draft=name, settings=("speculation.adaptive=false", *chosen)),
            requests=tuple(requests),
            lengths=_numbers(lengths, "--lengths"),
            verify=modes,
            streams=counts,
            num_rounds=rounds,
        )
        measured += _measured_or_refused(trial)
    if not measured:
        raise ConfigError("no draft could be tried; see the reasons above")
    # Report by number of streams, and recommend.
    for number in dict.fromkeys(each.num_streams for each in measured):
        console.print(_speed_table([each for each in measured if each.num_streams == number], planned))
    console.print(_acceptance_table(measured))
    _conclude(target, best_choice(measured), chosen, output)


def best_choice(measured: list[TrialFigures]) -> tuple[TrialFigures, float] | None:
    """Return the variant with the largest mean speed-up over the numbers of streams, or None if no draft pays.

    The speed-up is a geometric mean. The variant is given by the figures of one of its numbers of streams.
    """
    factors: defaultdict[tuple[str, int, str], list[float]] = defaultdict(list)
    for each in measured:
        factors[_variant(each)].append(each.sure_speedup)
    means = {variant: prod(each) ** (1 / len(each)) for variant, each in factors.items()}
    best = max(measured, key=lambda each: means[_variant(each)])
    return (best, means[_variant(best)]) if means[_variant(best)] >= _WORTH else None


def _variant(each: TrialFigures) -> tuple[str, int, str]:
    return each.draft, each.num_tokens, each.verify


def _measured_or_refused(trial: DraftTrial) -> list[TrialFigures]:
    """Measure in a child process, which frees its memory; report a draft that cannot run and continue."""
    report(
        f"{trial.draft}: {len(trial.requests)} requests, {len(trial.lengths) * len(trial.verify)} variants and plain"
    )
    try:
        return in_child(run_trial, trial)
    except RequestError:
        raise  # the traffic is wrong, for every draft
    except ServingError as error:
        report(f"{trial.draft}: cannot be tried: {error}")
    return []


def _fitting(numbers: tuple[int, ...], requests: list[TrafficRequest]) -> tuple[int, ...]:
    """Return the numbers of streams that the log has requests for; the smallest if it has too few for any."""
    fitting = tuple(number for number in numbers if number <= len(requests)) or (min(numbers),)
    if left_out := [number for number in numbers if number not in fitting]:
        report(f"streams {', '.join(map(str, left_out))} are left out: {len(requests)} requests do not fill them")
    return fitting


def _numbers(text: str, option: str) -> tuple[int, ...]:
    numbers = numbers_in(text, option, int, "write e.g. 2,4,8")
    if not all(1 <= number <= 256 for number in numbers):
        raise ConfigError(f"{option} {text!r} is outside 1 to 256")
    return numbers


def _one_of(text: str, allowed: list[str], option: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if strange := [name for name in names if name not in allowed]:
        raise ConfigError(f"{option} {strange[0]!r} is unknown; use {', '.join(allowed)}")
    return names


def _speed_table(measured: list[TrialFigures], planned: Callable[[TrialFigures], str]) -> Table:
    table = Table("draft", "K", "verify", "tokens per pass", "tokens/s", "speed-up", "planned")
    table.title = f"{measured[0].num_streams} at a time"
    best = max(measured, key=lambda each: each.sure_speedup)
    for each in measured:
        mark = " *" if each is best and each.sure_speedup >= _WORTH else " noise" if each.is_noisy else ""
        factor = f"{each.speedup:.2f}{mark}"
        tokens = f"{each.tokens_per_pass:.2f}" if each.drafts_per_pass else "no drafts"
        row = (each.draft, str(each.num_tokens), each.verify, tokens, f"{each.tokens_per_s:.1f}", factor, planned(each))
        table.add_row(*map(escape, row))
    return table


def _acceptance_table(measured: list[TrialFigures]) -> Table:
    """Return the acceptance of the longest drafts at the fewest streams, by class and position."""
    table = Table("draft and class", "verify", "accepted of the drafts at position 1, 2, ...")
    fewest, longest = min(each.num_streams for each in measured), max(each.num_tokens for each in measured)
    for each in measured:
        if (each.num_streams, each.num_tokens) == (fewest, longest):
            for found in each.classes:
                shares = " ".join("-" if share is None else f"{share:.0%}" for share in found.acceptance)
                table.add_row(escape(f"{each.draft}: {found.name}"), each.verify, shares)
    return table


def _planner(target: str, drafts: list[str], hardware: str | None) -> Callable[[TrialFigures], str]:
    """Return a function that predicts the speed-up of the measured passes on a device of `outrider plan`."""
    if hardware is None:
        return lambda _: ""
    device, shape = DeviceSpec.of(hardware), ModelShape.of(_folder(target), "bf16")
    shapes = {name: _planned_draft(name, shape) for name in drafts}

    def planned(each: TrialFigures) -> str:
        if each.draft not in shapes or not each.drafts_per_pass:
            return ""
        deployment = ReplicaPlan(
            shape, shapes[each.draft], device, 1, (), max(1, each.prompt_tokens), max(1, each.output_tokens)
        )
        factor = replayed_speed_up(
            deployment, each.num_streams, each.tokens_per_pass, each.drafts_per_pass, each.num_tokens
        )
        return f"{factor:.2f}"

    return planned


def _planned_draft(name: str, target: ModelShape) -> PlannedDraft | None:
    if name in _OF_TEXT:
        return None
    if name in _OF_TARGET:
        return PlannedDraft.of(SpeculationMethod(name), None, target, "int4")
    return PlannedDraft.of(SpeculationMethod.MODEL, _folder(name), target, "bf16")


def _folder(model: str) -> str:
    return resolve_model_path(str(BUNDLED[model]["target"]["path"]) if model in BUNDLED else model)


def _conclude(
    target: str, choice: tuple[TrialFigures, float] | None, settings: tuple[str, ...], output: Path | None
) -> None:
    if choice is None:
        report("no draft pays: plain decoding is as fast on this machine with this traffic")
        deployment = deployment_of(target, draft="none", settings=settings)
    else:
        best, speedup = choice
        report(f"best: {best.draft}, K = {best.num_tokens}, {best.verify}: {speedup:.2f} times plain decoding")
        found = (f"speculation.num_tokens={best.num_tokens}", f"speculation.verify={best.verify}")
        deployment = deployment_of(target, draft=best.draft, settings=(*found, *settings))
    text = to_yaml(deployment)
    if output is None:
        report(f"\n{text}")
        return
    write_text(output, text, "--output")
    report(f"written: {output}; outrider serve {output}")
