"""The operator's loop without an operator: traffic drifts, an alarm rings, a draft is tuned, tried, and kept or not.

    python -m bench.served.tuning_loop --questions mt_bench_question.jsonl spec_bench_question.jsonl --minutes 8

The demo pair serves Python, which its draft was trained on, then prose: first turns of the questions, without code and
mathematics. First each text is asked for without speculation; whatever the loop does, every later answer must be the
same. Of the prose, every fifth question measures: it is asked for when the traffic has turned and again at the end, and
is not logged (`store: false`), so that no draft is trained on it. In the end a draft of the present one's weights under
noise is put on trial, which must be rolled back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from bench.contenders.prompts import held_out_prompts
from bench.served.application import ServedApplication

HTTP_PORT = 8140
GRPC_PORT = 9140
FOLDER = Path(".cache/bench/tuning-loop").absolute()
URL = f"http://127.0.0.1:{HTTP_PORT}"
DEMO = Path("models/demo")
_NOT_PROSE = ("coding", "math", "math_reasoning")
_MEASURE_EVERY = 5
_POLL_S = 2.0
_NUM_PYTHON = 60
_NUM_TOKENS = 96
_NUM_DRAFTS = 4  # in every pass: an adaptive K drafts where drafts are likely to be right, and hides what drifts
_REPETITION_PENALTY = 1.2  # without it this small target's texts are loops


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its number; every text is greedy, which is where this draft suffers most from other traffic."""

    prompt: str | list[int]
    number: int

    def body(self, **more: Any) -> dict[str, Any]:
        """Return the request's body."""
        return {
            "model": "outrider-demo",
            "prompt": self.prompt,
            "max_tokens": _NUM_TOKENS,
            "temperature": 0.0,
            "repetition_penalty": _REPETITION_PENALTY,
            "ignore_eos": True,
            **more,
        }


@dataclass(slots=True)
class Texts:
    """The first answer to each question, and the later ones that failed or were others."""

    known: dict[int, str] = field(default_factory=dict)
    num_answers: int = 0
    num_changed: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of the deployment so far: first drafts and those accepted, verification passes and tokens accepted."""

    num_first: float
    num_first_accepted: float
    num_passes: float
    num_accepted: float

    def since(self, other: Acceptance) -> Acceptance:
        """Return what came after `other`."""
        return Acceptance(
            self.num_first - other.num_first,
            self.num_first_accepted - other.num_first_accepted,
            self.num_passes - other.num_passes,
            self.num_accepted - other.num_accepted,
        )

    @property
    def share(self) -> float:
        """Acceptance at the first position."""
        return self.num_first_accepted / self.num_first

    def __str__(self) -> str:
        per_pass = 1 + self.num_accepted / self.num_passes
        return f"{self.share:.3f} of {self.num_first:.0f} first drafts, {per_pass:.2f} tokens per pass"


class Loop:
    """The client of the deployment: asks, compares, and reads what the deployment says of itself."""

    def __init__(self, client: httpx.AsyncClient, num_users: int, pause_s: float) -> None:
        self._client = client
        self._num_users = num_users
        self._pause_s = pause_s
        self._began_s = time.perf_counter()
        self.texts = Texts()

    def say(self, text: str) -> None:
        """Print a line of the timeline."""
        print(f"{time.perf_counter() - self._began_s:6.0f} s: {text}", flush=True)

    async def ask(self, question: Question, **more: Any) -> None:
        """Ask, and compare with the first answer."""
        texts = self.texts
        try:
            reply = await self._client.post("/v1/completions", json=question.body(**more))
            reply.raise_for_status()
            text = reply.json()["choices"][0]["text"]
        except httpx.HTTPError as error:
            texts.failures.append(repr(error))
            return
        texts.num_answers += 1
        texts.num_changed += text != texts.known.setdefault(question.number, text)

    async def ask_all(self, questions: list[Question], **more: Any) -> None:
        """Ask all questions once."""
        left = iter(questions)

        async def user() -> None:
            for question in left:
                await self.ask(question, **more)

        await asyncio.gather(*(user() for _ in range(self._num_users)))

    async def measure(self, questions: list[Question]) -> Acceptance:
        """Ask all questions once, unlogged, and return their acceptance."""
        before = await self._acceptance()
        await self.ask_all(questions, store=False)
        return (await self._acceptance()).since(before)

    async def keep_asking(self, questions: list[Question], end: asyncio.Event) -> None:
        """Ask one after the other, round after round, with pauses."""
        numbers = count()

        async def user() -> None:
            while not end.is_set():
                await self.ask(questions[next(numbers) % len(questions)])
                await asyncio.sleep(self._pause_s)

        await asyncio.gather(*(user() for _ in range(self._num_users)))

    async def _acceptance(self) -> Acceptance:
        first, accepted, passes, tokens = 0.0, 0.0, 0.0, 0.0
        for family in text_string_to_metric_families((await self._client.get("/metrics")).text):
            total = sum(
                sample.value
                for sample in family.samples
                if sample.name.endswith("_total") and sample.labels.get("position", "0") == "0"
            )
            match family.name.removeprefix("outrider_spec_decode_"):
                case "class_draft_tokens_per_pos":
                    first = total
                case "class_accepted_tokens_per_pos":
                    accepted = total
                case "num_drafts":
                    passes = total
                case "num_accepted_tokens":
                    tokens = total
        return Acceptance(first, accepted, passes, tokens)

    async def draft(self) -> dict[str, Any]:
        """Return what the only pair says of its draft."""
        reply = await self._client.get("/admin/drafts")
        return dict(reply.json()["drafts"][0])

    async def until_tuned(self, timeout_s: float) -> dict[str, Any]:
        """Say whatever changes of the alarm, the training and the trial, and return the trial once it is over."""
        said = ""
        deadline_s = time.perf_counter() + timeout_s
        while time.perf_counter() < deadline_s:
            alarms = (await self._client.get("/health")).json().get("alarms")
            draft = await self.draft()
            canary = draft.get("canary")
            now = f"alarms {alarms}; {draft.get('tuning', 'no tuning')}; {_trial(canary)}"
            if now != said:
                self.say(now)
                said = now
            if canary and canary["outcome"] != "running":
                return dict(canary)
            await asyncio.sleep(_POLL_S)
        raise TimeoutError(f"no trial has ended within {timeout_s:.0f} s; the last word was: {said}")

    async def try_draft(self, path: Path, block_s: float) -> dict[str, Any]:
        """Put a draft on trial by hand, and return the trial once it is over."""
        reply = await self._client.post("/admin/drafts/canary", json={"path": str(path), "block_s": block_s})
        reply.raise_for_status()
        while (canary := (await self.draft())["canary"])["outcome"] == "running":  # noqa: ASYNC110  # of a server
            await asyncio.sleep(_POLL_S)
        return dict(canary)


def _trial(canary: dict[str, Any] | None) -> str:
    if canary is None:
        return "no trial"
    gain = "" if canary["gain"] is None else f", gain {canary['gain']:+.1%}"
    return f"{canary['name']} {canary['outcome']}, {canary['num_pairs']} pairs of blocks{gain}"


def python_questions() -> list[Question]:
    """Return beginnings of functions that the demo pair was not trained on."""
    return [Question(prompt, number) for number, prompt in enumerate(held_out_prompts(DEMO / "target", _NUM_PYTHON))]


def prose_questions(files: list[Path]) -> list[Question]:
    """Return the first turns of the questions of Spec-Bench or MT-Bench that ask for prose, each once."""
    lines = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    turns = dict.fromkeys(line["turns"][0] for line in lines if line["category"] not in _NOT_PROSE)
    return [Question(turn[:1500], number) for number, turn in enumerate(turns, start=_NUM_PYTHON)]


def write_worse(draft: Path, output: Path) -> None:
    """Write a draft under noise of a third of its weights' size."""
    shutil.copytree(draft, output)
    weights = load_file(output / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        floats = weight.float()
        weights[name] = (floats + 0.3 * floats.std() * torch.randn(floats.shape, generator=noise)).to(weight.dtype)
    save_file(weights, output / "model.safetensors", {"format": "pt"})


async def drive(options: argparse.Namespace) -> bool:
    """Go through the loop, print the timeline and the outcome, and return True if it did as it should."""
    python, prose = python_questions(), prose_questions(options.questions)
    measuring = prose[::_MEASURE_EVERY]
    training = [question for question in prose if question not in measuring]
    async with httpx.AsyncClient(base_url=URL, timeout=300.0) as client:
        loop = Loop(client, options.users, options.pause_s)
        await loop.ask_all([*python, *prose], store=False, speculation={"enabled": False})
        loop.say(f"{len(loop.texts.known)} texts are known, made without speculation")
        usual = await loop.measure(python)
        loop.say(f"Python: {usual}")
        await loop.ask_all(python * options.python_rounds)
        loop.say("the traffic turns to prose")
        turned_s = time.perf_counter()
        fallen = await loop.measure(measuring)
        loop.say(f"prose: {fallen}")
        end = asyncio.Event()
        traffic = asyncio.create_task(loop.keep_asking(training, end))
        try:
            tuned = await loop.until_tuned(options.timeout_s)
            tuned_s = time.perf_counter() - turned_s
            loop.say(f"{tuned['outcome']}: {tuned['reason']}")
            end.set()
            await traffic
            mended = await loop.measure(measuring)
            back = (mended.share - fallen.share) / (usual.share - fallen.share)
            loop.say(
                f"prose: {mended}: {back:.0%} of the lost acceptance is back, {tuned_s / 60:.1f} min after the turn"
            )
            end.clear()
            traffic = asyncio.create_task(loop.keep_asking(training, end))
            write_worse(Path((await loop.draft())["path"]), FOLDER / "worse")
            worse = await loop.try_draft(FOLDER / "worse", options.worse_block_s)
            loop.say(f"a draft under noise: {worse['outcome']}: {worse['reason']}")
        finally:
            end.set()
            await traffic
    texts = loop.texts
    print(
        f"{texts.num_answers} answers, {len(texts.failures)} failed {texts.failures[:3]}, {texts.num_changed} changed"
    )
    is_tuned = tuned["outcome"] == "kept" and worse["outcome"] == "rolled_back"
    return is_tuned and not texts.failures and not texts.num_changed


def start(minutes: float) -> ServedApplication:
    """Start the root deploy.yaml with a log, and alarms that are answered."""
    deploy = yaml.safe_load(Path("deploy.yaml").read_text(encoding="utf-8"))
    deploy["http_options"]["port"] = HTTP_PORT
    deploy["grpc_options"]["port"] = GRPC_PORT
    args = deploy["applications"][0]["args"]
    args["draft"]["process"] = "own"
    args["speculation"].update(num_tokens=_NUM_DRAFTS, adaptive=False)
    args["tune"] = {"log": str(FOLDER / "log"), "share": 1.0, "auto": True, "minutes": minutes}
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    path = FOLDER / "deploy.yaml"
    path.write_text(yaml.safe_dump(deploy, sort_keys=False), encoding="utf-8")
    return ServedApplication(path, URL)


def main() -> None:
    """Serve, drive, and end with 1 if a request failed, a text changed, or a trial ended as it should not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, nargs="+", required=True, help="files of MT-Bench, Spec-Bench")
    parser.add_argument("--minutes", type=float, default=8.0, help="of tune.auto")
    parser.add_argument("--users", type=int, default=3, help="who ask one after the other")
    parser.add_argument("--pause-s", type=float, default=1.0, help="of a user between answers")
    parser.add_argument("--python-rounds", type=int, default=20, help="of Python before the traffic turns")
    parser.add_argument("--worse-block-s", type=float, default=10.0, help="blocks of the worse draft's trial")
    parser.add_argument("--timeout-s", type=float, default=2400.0, help="for alarm, training and trial")
    options = parser.parse_args()
    application = start(options.minutes)
    try:
        application.wait_until_ready()
        is_right = asyncio.run(drive(options))
    finally:
        application.close()
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
