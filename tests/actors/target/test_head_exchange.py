"""Heads of a target are exchanged, roll back and outlive its death, without a file of another format than theirs."""

from __future__ import annotations

import asyncio
import multiprocessing
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.pair.pair_draft import PairDraft
from actors.pair.target_client import TargetClient, TargetHead
from actors.process.frames import private_folder
from actors.settings import DraftChoice, DraftSettings, PairSettings, write_choice
from actors.shell_messages import TARGET_SOCKET, HeadFailure, RunningHead
from actors.target.target_process import serve_target
from cluster.local.local_service import LocalPair
from engine.config import CacheConfig, EngineConfig, HeadConfig, HeadKind, ModelConfig, SchedulerConfig
from engine.config import SpeculationConfig as Speculation
from engine.engine_core.loading import load_engine
from protos.errors import RequestError
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod
from protos.served_model import CanaryOutcome, CheckDraft, DraftReport, SwapDraft
from tests.engine.fixtures.checkpoints import write_checkpoint
from tests.engine.fixtures.heads.block_heads import BlockShape, block_tensors, write_block_head
from tests.engine.fixtures.heads.eagle3_fixtures import head_tensors, write_original
from tests.engine.fixtures.heads.heads_fixtures import fit_medusa

pytestmark = pytest.mark.timeout(300)
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a head of each kind in the folder of its name; Medusa's is in torch's own format."""
    root = tmp_path_factory.mktemp("heads")
    write_checkpoint(root / "target", seed=0, num_positions=512)
    write_original(root / "eagle3", head_tensors(root / "target", 2), (1, 2))
    shape = BlockShape()
    write_block_head(root / "dflash", block_tensors(root / "target", 2, shape), (1, 2), shape)
    fit_medusa(root / "medusa", root / "target")
    for kind in (HeadKind.EAGLE3, HeadKind.DFLASH, HeadKind.MEDUSA):
        change_head(root / kind, root / f"other {kind}", 0.5)
        change_head(root / kind, root / f"bad {kind}", 1e38)  # finite weights, and states that are not
    return root


def change_head(source: Path, folder: Path, factor: float) -> None:
    shutil.copytree(source, folder)
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.pt")):
        is_pickled = file.suffix == ".pt"
        tensors = torch.load(file) if is_pickled else load_file(file)
        tensors |= {
            name: (factor * each).clamp(-3e38, 3e38) for name, each in tensors.items() if each.is_floating_point()
        }
        torch.save(tensors, file) if is_pickled else save_file(tensors, file)


def settings(root: Path, kind: HeadKind, name: str | None = None) -> PairSettings:
    method = SpeculationMethod(kind)
    engine = EngineConfig(
        ModelConfig(str(root / "target"), dtype="float32", device="cpu", num_threads=1),
        CacheConfig(8, 256, memory_bytes=None),
        SchedulerConfig(max_model_len=300),
        Speculation(3, methods=(method,), adaptive=False),
        HeadConfig(kind, str(root / (name or kind))),
    )
    return PairSettings(engine, DraftSettings(method))


def request(name: str, num_tokens: int) -> GenerateRequest:
    return GenerateRequest(name, (5, 6, 7, 9), SamplingParams(temperature=0.7, seed=3, max_tokens=num_tokens))


@pytest.fixture(scope="module")
def plain_text(root: Path) -> list[int]:
    core = load_engine(EngineConfig(settings(root, HeadKind.EAGLE3).engine.model, CacheConfig(8, 256)))
    core.add(request("plain", 256))
    text: list[int] = []
    while core.has_work:
        text += [token_id for chunk in core.step() for token_id in chunk.token_ids]
    return text


async def text_of(pair: LocalPair, asked: GenerateRequest) -> list[int]:
    return [id_ async for chunks in pair.generate(asked) for chunk in chunks for id_ in chunk.token_ids]


async def report_with(pair: LocalPair, path: Path) -> DraftReport:
    """Return the report once it has this path."""
    assert pair._drafts is not None
    for _ in range(100):
        if pair._drafts.first.report.path == str(path):
            break
        await asyncio.sleep(0.1)
    return pair._drafts.first.report


@pytest.mark.parametrize("kind", [HeadKind.EAGLE3, HeadKind.DFLASH])
async def test_a_head_is_exchanged_and_one_without_finite_drafts_is_left_and_no_text_changes(
    root: Path, plain_text: list[int], kind: HeadKind, tmp_path: Path
) -> None:
    """A refused order leaves the way back."""
    pair = LocalPair(settings(root, kind))
    await pair.start()
    try:
        (other,) = await pair.order_draft(SwapDraft(str(root / f"other {kind}"), TIMEOUT_S))
        assert (other.path, other.is_deployed) == (str(root / f"other {kind}"), False)
        assert await text_of(pair, request("a", 256)) == plain_text
        shutil.copytree(root / f"other {kind}", tmp_path / "gone")
        await pair.order_draft(SwapDraft(str(tmp_path / "gone"), TIMEOUT_S))
        shutil.rmtree(tmp_path / "gone")
        await pair.order_draft(SwapDraft(str(root / f"other {kind}"), TIMEOUT_S))
        await pair.order_draft(SwapDraft(str(tmp_path / "gone"), TIMEOUT_S))  # from memory
        await pair.order_draft(SwapDraft(str(root / f"other {kind}"), TIMEOUT_S))
        assert await text_of(pair, request("a2", 256)) == plain_text
        (bad,) = await pair.order_draft(SwapDraft(str(root / f"bad {kind}"), TIMEOUT_S))
        assert bad.digest != other.digest
        change_head(root / kind, tmp_path / "nan", float("nan"))
        with pytest.raises(RequestError, match="NaN"):
            await pair.order_draft(CheckDraft(str(tmp_path / "nan")))
        assert await text_of(pair, request("b", 256)) == plain_text
        left = await report_with(pair, root / f"other {kind}")
        assert left.canary is not None
        assert (left.digest, left.canary.path) == (other.digest, str(root / f"bad {kind}"))
        assert (left.canary.outcome, left.canary.reason) == (CanaryOutcome.ROLLED_BACK, "its drafts were not finite")
        assert await text_of(pair, request("c", 256)) == plain_text
    finally:
        await pair.close()


class RestartedTarget:
    """A target in its own process, and the shell's part for its head."""

    def __init__(self, pair: PairSettings) -> None:
        self._pair, self._folder = pair, private_folder()
        self._process: BaseProcess | None = None
        self.client = TargetClient(self._folder / TARGET_SOCKET)
        self.head = TargetHead(self.client)

    async def start(self) -> RunningHead:
        """Kill the process that runs, if any, and return the head of the next one."""
        await self.kill()
        self._process = multiprocessing.get_context("forkserver").Process(
            target=serve_target, args=(self._pair, self._folder, None, bool)
        )
        self._process.start()
        await self.client.wait_connected(TIMEOUT_S)
        return await self.head.running()

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.join, TIMEOUT_S)
            while self.client.is_connected:  # noqa: ASYNC110 -- the client has no event for it
                await asyncio.sleep(0.01)

    async def text(self, name: str, num_tokens: int) -> list[int]:
        stream, text = self.client.add(request(name, num_tokens)), []
        while not stream.is_finished:
            text += [id_ for chunk in await stream.next(TIMEOUT_S) for id_ in chunk.token_ids]
        return text

    async def close(self) -> None:
        await self.kill()
        await self.client.close()
        shutil.rmtree(self._folder)


@asynccontextmanager
async def running(pair: PairSettings) -> AsyncIterator[RestartedTarget]:
    target = RestartedTarget(pair)
    try:
        yield target
    finally:
        await target.close()


async def test_a_restarted_target_keeps_the_head_that_served_and_finds_the_deployed_one(
    root: Path, plain_text: list[int], tmp_path: Path
) -> None:
    """The heads are in torch's own format."""
    async with running(settings(root, HeadKind.MEDUSA)) as target:
        deployed = await target.start()
        change_head(root / "medusa", tmp_path / "nan", float("nan"))
        with pytest.raises(RequestError, match=r"'0\.0\.linear\.weight' in .* are NaN"):
            await target.head.check_draft(str(tmp_path / "nan"))
        other = str(root / "other medusa")
        digest = await target.head.replace_draft(other, TIMEOUT_S)
        for name in "ab":
            assert await target.text(name, 256) == plain_text
        assert await target.start() == RunningHead(other, digest)
        assert await target.text("c", 256) == plain_text
        assert await target.head.replace_draft(deployed.path, TIMEOUT_S) == deployed.digest


@pytest.mark.parametrize("kind", [HeadKind.EAGLE3, HeadKind.DFLASH])
async def test_a_target_that_dies_while_a_head_is_on_trial_starts_with_the_head_before(
    root: Path, plain_text: list[int], kind: HeadKind
) -> None:
    async with running(settings(root, kind)) as target:
        deployed = await target.start()
        first = DraftReport("pair", deployed.path, deployed.digest, 0.0, is_deployed=True)
        draft = PairDraft(target.head, first, target.head.goodput)
        other = str(root / f"other {kind}")
        await draft.carry_out(SwapDraft(other, TIMEOUT_S))
        assert await target.text("a", 8) == plain_text[:8]
        after = await target.start()
        reason = "the target ended before it had served"
        assert after == RunningHead(deployed.path, deployed.digest, HeadFailure(other, reason))
        draft.note_head(after)
        assert (draft.report.path, draft.report.is_deployed) == (deployed.path, True)
        assert draft.report.canary is not None
        assert (draft.report.canary.path, draft.report.canary.reason) == (other, reason)
        assert await target.text("b", 256) == plain_text
        for path in (other, deployed.path):
            await target.head.replace_draft(path, TIMEOUT_S)
        assert await target.start() == deployed, "a return is no trial"


async def test_a_target_whose_chosen_head_cannot_be_loaded_starts_with_the_deployed_one(
    root: Path, tmp_path: Path
) -> None:
    """A directory in the place of a file raises what no check of heads expects."""
    shutil.copytree(root / "eagle3", tmp_path / "broken")
    (tmp_path / "broken" / "mask_embedding.pt").mkdir()
    async with running(settings(root, HeadKind.EAGLE3)) as target:
        write_choice(target._folder, DraftChoice(str(tmp_path / "broken")))
        head = await target.start()
    assert head.path == str(root / "eagle3")
    assert head.failure is not None
    assert head.failure.path == str(tmp_path / "broken")
    assert "could not be loaded again" in head.failure.reason
