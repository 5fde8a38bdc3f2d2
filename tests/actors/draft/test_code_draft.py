"""`draft.kind: python`: a class drafts in its own process; it can slow a text down, and never changes it."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from actors.draft.code_draft import ChainsOf, CodeDraft, check_code
from engine.accounting.engine_stats import DraftStats
from engine.batch.draft import Draft, SparseDistribution
from engine.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.proposer import NoProposer
from engine.proposer.method_dispatcher import proposer_of
from engine.sequence.batch import DraftQuery, UnscheduledQuery
from engine.sequence.sequence import DraftRule, RequestTokens
from protos.errors import ConfigError
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod, VerifyMode
from tests.engine.fixtures.checkpoints import write_checkpoint

PATIENCE_S = 120.0  # on a busy machine
REQUESTS = [
    GenerateRequest(str(index), (5, 6, 7 + index), SamplingParams(temperature=temperature, seed=index, max_tokens=24))
    for index, temperature in enumerate((0.0, 0.7, 1.0))
]
QUERY = UnscheduledQuery(
    RequestTokens(GenerateRequest("0", (1,), SamplingParams(temperature=1.0)), DraftRule(4, VerifyMode.REJECTION)), 2
)
RECIPES = Path(__file__).parents[3] / "docs" / "contribute.md"
# Classes that no deployment should have, after the recipe's `Echo`.
CLASSES = """
import time
from engine.batch.draft import SparseDistribution

class Raises(Echo):
    def commit(self, sequences):
        raise RuntimeError("I am wrong")

class Hangs(Echo):
    def _draft(self, ids, most):
        time.sleep(1000)

class Foreign(Echo):
    BAD = [(-1,), (1 << 40,), ("x", 1), (70, 71), (2.5,), (5, None), tuple(range(60)), (True,)]
    def _draft(self, ids, most):
        wrong = SparseDistribution((3,), (1 << 16,))
        return Draft(self.BAD[len(ids) % len(self.BAD)], (wrong,))

class Tree(Echo):
    def _draft(self, ids, most):
        return Draft((1, 2), (), (-1, -1))

class NoProposer:
    pass

class NoStart(Echo):
    def __init__(self):
        raise ValueError("no table")

class NoEnd(Echo):
    def __init__(self):
        time.sleep(1000)
"""
RunTexts = tuple[dict[str, tuple[int, ...]], DraftStats]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint(folder, seed=1)
    return folder


@pytest.fixture
def classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPES.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    (tmp_path / "my_drafters.py").write_text(recipe + CLASSES)
    monkeypatch.syspath_prepend(str(tmp_path))


@contextmanager
def drafting(folder: Path, name: str) -> Iterator[CodeDraft]:
    draft = CodeDraft(folder / "sockets", f"my_drafters:{name}", silent_s=0.3, pause_s=0.1)
    try:
        yield draft
    finally:
        draft.close_process()


def engine_of(target: Path, draft: CodeDraft | None, verify: VerifyMode = VerifyMode.COUPLED) -> EngineCore:
    methods = (SpeculationMethod.PYTHON,)
    config = EngineConfig(
        ModelConfig(str(target), dtype="float32", device="cpu"),
        CacheConfig(num_blocks=64),
        speculation=SpeculationConfig(3, verify, methods=methods),
    )
    return load_engine(
        config, None if draft is None else proposer_of(methods, others={SpeculationMethod.PYTHON: draft})
    )


def texts(core: EngineCore, requests: list[GenerateRequest]) -> RunTexts:
    for request in requests:
        core.add(request)
    found: dict[str, tuple[int, ...]] = {}
    while core.has_work:
        for chunk in core.step():
            found[chunk.request_id] = found.get(chunk.request_id, ()) + chunk.token_ids
    return found, core.stats().drafts


def wait_for(condition: Callable[[], bool], draft: CodeDraft) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        draft.flush()
        time.sleep(0.01)


def connect(draft: CodeDraft) -> None:
    wait_for(lambda: draft.stats.is_connected, draft)


@pytest.mark.usefixtures("classes", "patient_target")
def test_a_class_drafts_and_changes_no_token(target: Path, tmp_path: Path) -> None:
    with drafting(tmp_path, "Echo") as draft:
        connect(draft)
        drafted, stats = texts(engine_of(target, draft), REQUESTS)
        assert stats.num_draft_tokens > 10
        assert drafted == texts(engine_of(target, None), REQUESTS)[0]
        core = engine_of(target, draft, VerifyMode.REJECTION)
        assert texts(core, REQUESTS[:1])[0] == {"0": drafted["0"]}
        assert core.stats().drafts.num_draft_tokens > 0


@pytest.mark.usefixtures("classes")
@pytest.mark.parametrize("name", ["Foreign", "Tree", "Raises"])
def test_a_class_that_fails_or_drafts_foreign_ids_is_outlived(
    name: str, target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with drafting(tmp_path, name) as draft:
        connect(draft)
        assert texts(engine_of(target, draft), REQUESTS)[0] == texts(engine_of(target, None), REQUESTS)[0]
        if name != "Foreign":
            wait_for(lambda: draft.stats.num_connections > 1, draft)  # it is started again
            assert f"draft.code my_drafters:{name}" in caplog.text


@pytest.mark.usefixtures("classes")
def test_a_class_that_hangs_costs_one_wait_and_is_started_again_by_name(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), drafting(tmp_path, "Hangs") as draft:
        connect(draft)
        core, plain = engine_of(target, draft), texts(engine_of(target, None), REQUESTS)[0]
        num_runs = 0
        while draft.stats.num_connections < 2:
            renamed = [
                GenerateRequest(f"{num_runs}-{each.request_id}", each.prompt_token_ids, each.sampling)
                for each in REQUESTS
            ]
            found = texts(core, renamed)[0]
            assert {name.partition("-")[2]: text for name, text in found.items()} == plain
            num_runs += 1
            draft.flush()
            time.sleep(0.01)
        assert "draft.code my_drafters:Hangs hangs" in caplog.text


@pytest.mark.usefixtures("classes")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:Echo", "draft.code 'no_such_module:Echo' cannot be loaded: ModuleNotFoundError"),
        ("my_drafters:NoSuch", "cannot be loaded: AttributeError"),
        ("my_drafters:NoStart", "cannot be loaded: ValueError: no table"),
        ("my_drafters:NoProposer", "has no open, propose, commit, close"),
    ],
)
def test_what_is_no_proposer_is_refused_by_name_at_the_start(name: str, said: str, tmp_path: Path) -> None:
    from actors.draft.code_draft import proposer_of as proposer_by_name

    sys.modules.pop("my_drafters", None)
    with pytest.raises(ConfigError) as caught:
        proposer_by_name(name)
    assert said in str(caught.value)


@pytest.mark.usefixtures("classes")
def test_the_start_reports_what_the_process_says(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no table"):
        CodeDraft(tmp_path / "sockets", "my_drafters:NoStart")


@pytest.mark.usefixtures("classes")
def test_a_check_of_a_class_that_loads_for_ever_ends() -> None:
    with pytest.raises(ConfigError, match="'my_drafters:NoEnd' was not loaded within 5 s"):
        check_code("my_drafters:NoEnd", timeout_s=5.0)


def test_no_distribution_of_a_class_is_believed() -> None:
    """A false one would bias texts under `rejection`; a draft without one is verified as certain."""

    class Liar(NoProposer):
        def propose(self, queries: Sequence[DraftQuery]) -> list[Draft]:
            return [Draft((1, 2, 3), (SparseDistribution((9,), (1 << 16,)),) * 3)]

    assert ChainsOf(Liar(), "Liar").propose([QUERY]) == [Draft((1, 2))]  # type: ignore[arg-type]


def test_a_draft_without_end_is_read_to_its_limit() -> None:
    class Endless(NoProposer):
        def propose(self, queries: Sequence[DraftQuery]) -> list[Draft]:
            return [Draft(count(5))]  # type: ignore[arg-type]

    assert ChainsOf(Endless(), "Endless").propose([QUERY]) == [Draft((5, 6))]  # type: ignore[arg-type]
