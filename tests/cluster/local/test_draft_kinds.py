"""Every source of drafts is served once, and each surface names it and has the right counts."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from textual.widgets import DataTable

from cluster.cli.__main__ import main
from cluster.cli.server import Reading, figures_between, read_metrics
from cluster.cli.top_view import TopView
from cluster.config import parse_config
from cluster.local.local_service import local_settings, running_service
from engine.config import HeadKind
from protos.messages import SpeculationMethod
from router.api_keys import ApiKeys
from router.openai.api import build_app
from tests.engine.fixtures.checkpoints import write_checkpoint, write_letters
from tests.engine.fixtures.heads.block_heads import (
    MASK_ID,
    BlockShape,
    block_tensors,
    peagle_tensors,
    write_block_head,
    write_dflash_of_its_authors,
    write_peagle,
)
from tests.engine.fixtures.heads.eagle3_fixtures import head_tensors, write_original
from tests.engine.fixtures.heads.heads_fixtures import add_mtp, fit_medusa

PAGE = Path(__file__).parents[2] / "router" / "page" / "live_text.mjs"
TAPS = (1, 2)  # of a target with two layers
PROMPTS = [[start, start + 9, start + 33, 2, 17] * 4 for start in range(1, 25, 3)]
MAX_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Kind:
    """A `draft` section with `{}` for the folder of all models, the method's name, and the shape of its drafts."""

    draft: dict[str, Any]
    method: str
    shape: str = "chain"

    @property
    def drafter(self) -> str:
        """Its name in an explanation."""
        return self.method if self.shape == "chain" else f"{self.method}:{self.shape}"


def _head(kind: str, shape: str, name: str = "") -> Kind:
    return Kind({"kind": kind, "path": f"{{}}/{name or kind}"}, kind, shape)


KINDS = {
    "model": Kind({"kind": "model", "path": "{}/draft", "dtype": "float32"}, "model"),
    "pard": Kind({"kind": "model", "path": "{}/pard", "dtype": "float32"}, "model", "block"),
    "self": Kind({"kind": "self", "num_layers": 1}, "self"),
    "suffix": Kind({"kind": "suffix"}, "suffix"),
    "ngram": Kind({"kind": "ngram"}, "ngram"),
    "medusa": _head("medusa", "block"),
    "eagle3": _head("eagle3", "chain"),
    "peagle": _head("peagle", "block"),
    "mtp": Kind({"kind": "mtp"}, "mtp"),
    "dflash": _head("dflash", "block"),
    "dflash2": _head("dflash", "block", "dflash2"),
    "dflash of z-lab": _head("dflash", "block", "z-lab"),
    "xpress": _head("dflash", "block", "xpress"),
    "dspark": _head("dspark", "block"),
    "python": Kind({"kind": "python", "code": "my_drafters:Last"}, "python"),
}
CODE = """
from engine.batch.draft import Draft

class Last:
    def open(self, sequence): ...
    def commit(self, sequences): ...
    def close(self, request_id): ...
    def propose(self, queries):
        return [Draft((query.sequence.token_ids[-1],) * query.max_draft_tokens) for query in queries]
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kinds")
    target = root / "target"
    write_checkpoint(target, seed=0)
    add_mtp(target)
    write_letters(target)
    for name in ("draft", "pard"):
        write_checkpoint(root / name, seed=0, noise=0.02)
        add_mtp(root / name)  # which makes it the target's like
        write_letters(root / name)
    config = json.loads((root / "pard" / "config.json").read_text())
    (root / "pard" / "config.json").write_text(json.dumps(config | {"pard_token": MASK_ID}))
    fit_medusa(root / "medusa", target)
    write_original(root / "eagle3", head_tensors(target, len(TAPS)), TAPS)
    write_peagle(root / "peagle", peagle_tensors(target, len(TAPS)), TAPS)
    shapes = {
        "dflash": BlockShape(),
        "dspark": BlockShape(is_anchor_drafting=True, markov_type="vanilla"),
        "dflash2": BlockShape(is_refined=True),
        "xpress": BlockShape(has_refiner=True),
    }
    for name, shape in shapes.items():
        write_block_head(root / name, block_tensors(target, len(TAPS), shape), TAPS, shape)
    write_dflash_of_its_authors(root / "z-lab", block_tensors(target, len(TAPS), BlockShape()), TAPS, BlockShape())
    (root / "my_drafters.py").write_text(CODE)
    return root


def test_every_kind_is_here() -> None:
    served = {kind.draft["kind"] for kind in KINDS.values()}
    free = {SpeculationMethod.HYBRID, SpeculationMethod.AUTO, SpeculationMethod.NONE}
    assert served == {*SpeculationMethod} - free
    assert served >= {*map(str, HeadKind)}


def deployment(root: Path, kind: Kind) -> dict[str, Any]:
    draft = {key: value.format(root) if isinstance(value, str) else value for key, value in kind.draft.items()}
    return {
        "model_id": "m",
        "target": {"path": str(root / "target"), "dtype": "float32", "num_threads": 1},
        "draft": draft,
        "cache": {"num_blocks": 64},
        "scheduler": {"max_model_len": 128},
        "speculation": {"adaptive": False, "num_tokens": 3},
    }


@pytest.mark.usefixtures("patient_target")
@pytest.mark.parametrize("name", KINDS)
async def test_each_surface_names_the_drafts_and_counts_them(
    name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = KINDS[name]
    monkeypatch.syspath_prepend(str(root))  # where the class of `python` is
    args = deployment(root, kind)
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump(_deploy_file(args)))
    # The commands that start nothing.
    assert main(["check", str(file)]) == 0
    assert f"drafts by {kind.method}; requests may choose" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", str(file), "--streams", "1", "--acceptance", "0.95"]) == 0
    planned = capsys.readouterr().out
    assert f"drafts: {kind.method}" in " ".join(planned.split())
    assert ("block" in planned) is (kind.shape == "block")
    # A request, its answer and the metrics after it.
    answer, text = await _served(args)
    passes, reading = _check_answer(kind, answer), read_metrics(text)
    assert _by(reading, "outrider_spec_decode_passes", "shape") == passes
    usage = answer["usage"]["completion_tokens_details"]
    accepted, rejected = usage["accepted_draft_tokens"], usage["rejected_draft_tokens"]
    assert answer["usage"]["completion_tokens"] == sum(passes.values()) + accepted
    assert _sum(reading, "outrider_spec_decode_num_drafts") == sum(passes.values()) - passes["none"]
    assert _sum(reading, "outrider_spec_decode_num_draft_tokens") == accepted + rejected > 0
    drafted = _by(reading, "outrider_spec_decode_class_draft_tokens_per_pos", "method")
    assert drafted[kind.method] > 0
    assert sum(drafted.values()) == accepted + rejected
    assert _sum(reading, "outrider_spec_decode_class_accepted_tokens_per_pos") == accepted
    # The screens.
    await _check_top(kind, reading, passes, accepted)
    if shutil.which("node"):
        _check_page(kind, text, passes, accepted, accepted + rejected)


def _deploy_file(args: dict[str, Any]) -> dict[str, Any]:
    bundled = yaml.safe_load((Path(__file__).parents[3] / "deploy.yaml").read_text())
    bundled["applications"][0]["args"] = args
    return dict(bundled)


async def _served(args: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a completion and the metrics after it."""
    config = parse_config(args)
    body = {
        "prompt": PROMPTS,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "return_token_sources": True,
        "speculation": {"explain": True},
    }
    async with running_service(config, local_settings(config)) as service:
        transport = httpx.ASGITransport(build_app(service, ApiKeys(None)))
        async with httpx.AsyncClient(transport=transport, base_url="http://m", timeout=60.0) as http:
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json(), (await http.get("/metrics")).text


def _check_answer(kind: Kind, answer: dict[str, Any]) -> dict[str, float]:
    """Check the explanation and the sources of tokens; return the passes by shape that the metrics should have."""
    explained = answer["metrics"]["speculation_explanation"]
    own = explained["passes"][kind.drafter]
    assert explained["passes"].keys() <= {kind.drafter, "ngram"}, "n-grams replace a draft that is not ready"
    sources = [source for choice in answer["choices"] for source in choice["token_sources"]]
    accepted = [source for source in sources if source.startswith("accepted:")]
    assert len(accepted) == answer["usage"]["completion_tokens_details"]["accepted_draft_tokens"]
    assert f"accepted:{kind.method}" in accepted
    assert {*accepted} <= {f"accepted:{kind.method}", "accepted:ngram"}
    passes = {"none": float(sum(explained["plain_passes"].values())), kind.shape: float(own)}
    if kind.drafter != "ngram" and "ngram" in explained["passes"]:
        passes["chain"] = passes.get("chain", 0.0) + explained["passes"]["ngram"]
    return passes


async def _check_top(kind: Kind, reading: Reading, passes: dict[str, float], accepted: int) -> None:
    figures = figures_between({}, reading, 1.0)
    (pair,) = figures.pairs
    assert pair.tokens_per_pass == pytest.approx(1 + accepted / (sum(passes.values()) - passes["none"]))
    assert not pair.is_draft_away
    shares = {shape: f"{shape} {number / sum(passes.values()):.0%}" for shape, number in passes.items() if number}
    assert pair.shapes == ", ".join(shares[shape] for shape in sorted(shares))
    app = TopView(lambda: reading, interval_s=3600.0)
    async with app.run_test(size=(160, 40)) as pilot:
        await pilot.pause()
        app.show(figures)
        rows = app.query_one("#classes", DataTable)
        names = [str(rows.get_row_at(index)[0]) for index in range(rows.row_count)]
        assert f"{kind.method}-greedy-free" in names


def _check_page(kind: Kind, metrics: str, passes: dict[str, float], accepted: int, drafted: int) -> None:
    done = subprocess.run(["node", str(PAGE)], input=metrics, capture_output=True, text=True, timeout=60, check=True)
    shown = json.loads(done.stdout)
    total = sum(passes.values())
    for shape, number in passes.items():
        assert f"{shape} {_percent(number / total)}" in shown["live-shapes"]
    assert ["drafts accepted", _percent(accepted / drafted)] in shown["live-figures"]
    assert ["greedy-free", kind.method] in [row[:2] for row in shown["live-acceptance"]]
    has_process = kind.method in ("model", "python")
    assert shown["pairs"][1][-1] == ("connected" if has_process else "none")
    assert shown["alarms"] == "No alarms."


def _percent(share: float) -> str:
    """Round half up, as JavaScript does."""
    return f"{math.floor(1000 * share + 0.5) / 10:.1f}%"


def _by(reading: Reading, name: str, label: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for key, value in reading[name].items():
        each = dict(key)[label]
        sums[each] = sums.get(each, 0.0) + value
    return sums


def _sum(reading: Reading, name: str) -> float:
    return sum(reading[name].values())
