"""The race against peers, with made-up systems: counts, omissions, kills and reports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from bench.contenders.contender import Contender, ContenderRun, Prompts, equal_share
from bench.contenders.transformers_contender import load
from bench.peers import servers, shapes, vllm_server
from bench.peers.compressed_export import export_int8
from bench.peers.install import _convert_once
from bench.peers.libraries import Worker, WorkerSystem
from bench.peers.page import (
    DOCS,
    PAGE,
    README,
    README_PART,
    RECORDS,
    SHAPE_RECORDS,
    SHAPES_PART,
    Conditions,
    gaps,
    part,
    read_records,
    readme_part,
    record_of,
    rows_of,
    shapes_part,
    with_part,
)
from bench.peers.system import DraftingMode, ModelPair, Precision, RaceResults, Schedule, SystemLimits, run_rounds
from bench.peers.vllm_server import VllmSystem
from cluster.local.serve_environment import free_port

PROMPTS = [[1, 2], [3, 4]]
NUM_TOKENS = 4
LIMITS = SystemLimits(num_threads=2, draft_lengths=(2, 4), max_streams=2, max_new_tokens=16, deadline_s=60.0)
ECHO = """
import json, sys
print(json.dumps({}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    outputs = [prompt[:1] * request["num_tokens"] for prompt in request["prompts"]]
    arrivals = [[0.5, 0.75] for _ in outputs]
    print(json.dumps({"outputs": outputs, "arrivals": arrivals, "seconds": 2.0}), flush=True)
"""


class CountingContender:
    """Repeats the first token of each prompt; its draft, when it has one, changes the last token."""

    def __init__(self, name: str, mode: DraftingMode, num_returned: int | None, seconds: float = 0.5) -> None:
        self.name = name
        self._mode, self._num_returned, self._seconds = mode, num_returned, seconds

    def run(self, prompts: Prompts, num_tokens: int) -> ContenderRun:
        length = num_tokens if self._num_returned is None else self._num_returned
        outputs = [prompt[:1] * length for prompt in prompts]
        if self._mode is DraftingMode.DRAFT:
            outputs = [[*output[:-1], 99] for output in outputs]
        arrivals = [[0.1 * (index + 1) for index in range(length)] for _ in prompts]
        return ContenderRun(outputs, self._seconds, arrivals=arrivals)

    def close(self) -> None:
        pass


class CountingSystem:
    settings = "nothing to set"

    def __init__(self, name: str = "counting bf16", num_returned: int | None = None) -> None:
        self.name = name
        self.num_starts = self.num_closes = 0
        self._num_returned = num_returned

    def start(self) -> dict[DraftingMode, dict[str, Contender]]:
        self.num_starts += 1
        modes: dict[DraftingMode, dict[str, Contender]] = {
            mode: {"the only one": CountingContender(self.name, mode, self._num_returned)} for mode in DraftingMode
        }
        modes[DraftingMode.LOOKUP] |= {"fast": CountingContender(self.name, DraftingMode.LOOKUP, None, 0.25)}
        return modes

    def close(self) -> None:
        self.num_closes += 1


def held(*systems: CountingSystem, num_rounds: int = 2, max_s: float = 60.0) -> RaceResults:
    return run_rounds(systems, {"toy text": PROMPTS}, Schedule((1, 2), NUM_TOKENS, NUM_TOKENS, num_rounds, max_s))


REFERENCE = {"toy text": [[1] * NUM_TOKENS, [3, 3, 7, 7]]}


def test_each_round_measures_every_system_in_all_modes_at_every_number_of_streams() -> None:
    system = CountingSystem()
    outcome = held(system)
    keys = [(m.num_streams, m.mode) for m in outcome.measurements]
    assert sorted(keys) == sorted([(n, mode) for n in (1, 2) for mode in DraftingMode] * 2)
    assert (system.num_starts, system.num_closes, outcome.num_rounds) == (2, 2, 2)


def test_each_system_runs_at_the_fastest_of_its_settings() -> None:
    rows = {row.mode: row for row in rows_of(held(CountingSystem()).measurements, REFERENCE) if row.num_streams == 1}
    assert (rows[DraftingMode.LOOKUP].setting, rows[DraftingMode.LOOKUP].num_tried) == ("fast", 2)
    assert rows[DraftingMode.LOOKUP].tokens_per_second == NUM_TOKENS / 0.25


def test_a_text_with_fewer_prompts_runs_at_no_more_streams_and_a_plain_one_without_drafts() -> None:
    texts = {"both": PROMPTS, "one": [[5] * 9]}
    schedule = Schedule((1, 2), NUM_TOKENS, NUM_TOKENS, 1, 60.0, plain_texts=frozenset({"one"}))
    runs = [
        (each.text, each.num_streams, each.mode)
        for each in run_rounds([CountingSystem()], texts, schedule).measurements
    ]
    assert runs == [
        *(("both", number, mode) for number in (1, 2) for mode in DraftingMode),
        ("one", 1, DraftingMode.PLAIN),
    ]


class ProcessSystem(CountingSystem):
    """Has a process that takes a while and 64 MiB to get ready."""

    def start(self) -> dict[DraftingMode, dict[str, Contender]]:
        code = "import time; block = bytearray(64 << 20); print(flush=True); time.sleep(600)"
        self.process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.process.stdout.readline()
        return super().start()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_each_start_has_its_seconds_and_the_most_memory_of_its_processes() -> None:
    (start,) = held(ProcessSystem(), num_rounds=1).starts["counting bf16"]
    assert 0 < start.ready_s < 60
    assert start.peak_bytes is not None
    assert 64 << 20 <= start.peak_bytes < 512 << 20
    with subprocess.Popen(["sleep", "60"]) as another:
        assert held(CountingSystem(), num_rounds=2).starts["counting bf16"][1].peak_bytes is None
        another.kill()


class LookupSystem(CountingSystem):
    """Has no plain mode: another system of the same name has it."""

    def start(self) -> dict[DraftingMode, dict[str, Contender]]:
        return {mode: each for mode, each in super().start().items() if mode is DraftingMode.LOOKUP}


def test_a_system_of_lookups_alone_is_measured_and_its_start_is_left_to_the_plain_one() -> None:
    outcome = held(LookupSystem(), num_rounds=1)
    assert not outcome.failures
    assert not outcome.starts
    assert {each.mode for each in outcome.measurements} == {DraftingMode.LOOKUP}


def test_a_round_that_would_end_too_late_does_not_begin() -> None:
    assert held(CountingSystem(), num_rounds=5, max_s=0.0).num_rounds == 1


def test_a_system_that_answers_short_is_left_out_and_the_others_go_on() -> None:
    short, whole = CountingSystem("short bf16", num_returned=3), CountingSystem()
    outcome = held(short, whole)
    assert "lengths" in outcome.failures["short bf16"]
    assert short.num_starts == short.num_closes == 1
    assert {m.system for m in outcome.measurements} == {"counting bf16"}


def test_rows_compare_with_the_own_plain_text_and_with_the_reference() -> None:
    rows = {(row.num_streams, row.mode): row for row in rows_of(held(CountingSystem()).measurements, REFERENCE)}
    plain, draft = rows[2, DraftingMode.PLAIN], rows[2, DraftingMode.DRAFT]
    assert plain.own_share is None
    assert draft.own_share == 6 / 8
    assert plain.reference_share == 6 / 8
    assert draft.reference_share == 5 / 8
    assert plain.tokens_per_second == 2 * NUM_TOKENS / 0.5
    assert plain.first_token["p50"] == pytest.approx(100)
    assert plain.between["p99"] == pytest.approx(100)


def test_arrivals_of_one_pass_make_no_gap() -> None:
    assert gaps([0.1, 0.1001, 0.1002, 0.2]) == pytest.approx([0.0998])


def test_shared_counts_positions() -> None:
    assert equal_share([[1, 2, 3]], [[1, 5, 3]]) == 2 / 3


def test_the_page_never_rounds_a_share_up_to_all() -> None:
    outcome = held(CountingSystem())
    outcome.failures["absent bf16"] = "RuntimeError: it would not start"
    conditions = Conditions(
        "padded", "of a toy", outcome.num_rounds, NUM_TOKENS, 2, LIMITS, 0.1, "python -m bench.peers"
    )
    record = json.loads(
        json.dumps(record_of(rows_of(outcome.measurements, REFERENCE), outcome, [CountingSystem()], conditions))
    )
    text = part(record)
    assert re.search(
        r"\| counting bf16 \| plain \| 8.0 \(100\) \| 16.0 \(100\) \|  \| 75% \| \d.\d, \d.\d \|  \|", text
    )
    assert "| counting bf16 | with draft | 8.0 (100) | 16.0 (100) | 75% | 62.5% | | |" in text
    assert "| counting bf16 | with lookup | **16.0** (100) | **32.0** (100) | 100% | 75% |" in text
    assert "- With one setting of drafts, without a search for the best: counting bf16 with draft." in text
    assert "- Not measured to the end: absent bf16: RuntimeError: it would not start" in text
    assert record["command"] == "python -m bench.peers"
    assert {"torch", "transformers", "ray", "openvino-genai"} <= record["versions"].keys()
    assert "cores" in record["machine"]
    assert record["settings"] == [["counting bf16", "nothing to set"]]


@pytest.mark.parametrize("name", RECORDS)
def test_the_page_of_figures_is_that_of_the_records(name: str) -> None:
    text = (DOCS / PAGE).read_text(encoding="utf-8")
    record = json.loads((DOCS / f"{name}.json").read_text(encoding="utf-8"))
    assert with_part(text, name, part(record)) == text, "run python -m bench.peers.page"


def test_the_table_of_shapes_is_that_of_the_records() -> None:
    text = (DOCS / PAGE).read_text(encoding="utf-8")
    assert with_part(text, SHAPES_PART, shapes_part(read_records())) == text, "run python -m bench.peers.page"


def test_a_shape_of_random_weights_has_a_tokenizer_of_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"model_type": "qwen2", "vocab_size": 400, "hidden_size": 32, "intermediate_size": 64} | {
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1
    }  # fmt: skip
    monkeypatch.setattr(shapes, "SHAPES", {"tiny": shape})
    monkeypatch.setattr(shapes, "CACHE", tmp_path)
    folder = shapes.random_checkpoint("tiny")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert (tokenizer.get_vocab_size(), tokenizer.decode(tokenizer.encode("grün").ids)) == (400, "grün")
    assert load(folder).config.vocab_size == 400
    assert [len(each) for each in shapes.random_prompts("tiny", 2, 7)] == [7, 7]


def test_every_number_of_the_readme_is_that_of_a_record() -> None:
    text = (DOCS.parent / README).read_text(encoding="utf-8")
    assert with_part(text, README_PART, readme_part(read_records())) == text, "run python -m bench.peers.page"


def row(system: str, speed: float, mode: DraftingMode = DraftingMode.PLAIN, num_tried: int = 1) -> dict[str, object]:
    return {"system": system, "mode": mode, "text": "code", "num_streams": 1, "setting": "", "num_tried": num_tried} | {
        "tokens_per_second": speed, "first_token": {"p50": 1.0}, "own_share": None, "reference_share": 1.0
    }  # fmt: skip


def record_with(*rows: dict[str, object]) -> dict[str, object]:
    named = {"model": "m", "machine": "two cores", "rounds": 2}
    return {"conditions": ["one", "two"], "settings": [], "failures": {}, "starts": {}, "rows": list(rows), **named}


def test_all_texts_have_their_ratio_and_the_first_its_table() -> None:
    rows = [row("outrider int4", 30.0), row("openvino int4", 20.0)]
    text = part(record_with(*rows, *({**each, "text": "chats"} for each in rows)))
    assert text.count("| outrider int4 | plain |") == 1
    assert "| code, both plain | 1.50 (openvino) |\n| chats, both plain | 1.50 (openvino) |" in text


def test_the_table_leaves_out_a_precision_that_is_never_its_peers_fastest() -> None:
    rows = [row("outrider int4", 30.0), row("outrider bf16", 20.0), row("outrider bf16, no Ray", 10.0)]
    text = part(record_with(*rows, row("openvino bf16", 5.0)))
    shown = [line.split("|")[1].strip() for line in text.splitlines() if "| plain |" in line]
    assert shown == ["outrider int4", "outrider bf16, no Ray", "openvino bf16"]


def test_all_shapes_stand_in_one_table() -> None:
    long = {"text": "code, 512", "first_token": {"p50": 1500.0}}
    record = record_with(row("outrider int4", 30.0), row("outrider int4", 1.0) | long)
    record["starts"] = {
        "outrider int4": [{"ready_s": 9.0, "peak_bytes": 12 * 10**8}, {"ready_s": 4.0, "peak_bytes": 10**9}]
    }
    text = shapes_part(dict.fromkeys(SHAPE_RECORDS[:2], record))
    assert text.startswith("| | 1 stream | first token after 512 | ready, s | GB |\n")
    assert text.count("| m, outrider int4 | 30.0 (1) | 1.5 s | 9.0, 4.0 | 1.20 |") == 2


def test_a_row_that_is_not_best_against_best_has_its_reason() -> None:
    ours = [row("outrider bf16", 30.0), row("outrider bf16", 90.0, DraftingMode.DRAFT, 3)]
    plain, drafting = row("llama-server bf16", 20.0), row("llama-server bf16", 45.0, DraftingMode.LOOKUP, 4)
    best = readme_part({"peers-smollm2": record_with(*ours, plain, drafting)})
    assert "| **2.0x** | llama-server bf16, with lookup | outrider bf16, with draft, code; one stream;" in best
    assert "not best" not in best
    for rows, reason in (
        ([plain], "the peer ran without drafts"),
        ([plain, drafting | {"num_tried": 1}], "one setting of drafts each"),
    ):
        assert f"not best against best: {reason} |" in readme_part({"peers-smollm2": record_with(*ours, *rows)})
        table = part(record_with(*ours, *rows))
        assert f"| code, with drafts; not best against best: {reason} |" in table
        assert "| code, both plain | 1.50 (llama-server) |" in table


def test_a_record_that_is_not_there_has_no_row() -> None:
    assert readme_part({}).count("\n") == 2
    assert readme_part({"peers": record_with(row("outrider bf16", 1.0))}).count("\n") == 2


LLAMA = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
params = json.loads(sys.argv[1])
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.do_GET()
        answer = [params["n_parallel"], params["n_ctx"], params.get("speculative", {}).get("draft", {}).get("n_max", 0)]
        for token in answer[: body["n_predict"]]:
            self.wfile.write(b"data: " + json.dumps({"tokens": [token]}).encode() + b"\\n\\n")
        self.wfile.write(b"data: " + json.dumps({"tokens_predicted": body["n_predict"]}).encode() + b"\\n\\n")
HTTPServer(("127.0.0.1", params["port"]), Handler).serve_forever()
"""


def test_llama_server_runs_plain_with_each_lookup_and_with_the_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each setting and number of streams has a process of its own; the stub answers with its parameters."""
    monkeypatch.setattr(servers, "PORT", free_port())
    program = tmp_path / "llama_server.py"
    program.write_text(LLAMA)
    pair = ModelPair(tmp_path / "target.gguf", tmp_path / "draft.gguf")
    system = servers.LlamaServerSystem([sys.executable, "-S", str(program)], pair, LIMITS, tmp_path)
    modes = system.start()
    try:
        plain = modes[DraftingMode.PLAIN]["{}"]
        outputs = [plain.run([[1] * length] * number, 3).outputs for number, length in ((1, 5), (2, 100))]
        with_part = plain.run([[1]], 4).outputs
        draft = modes[DraftingMode.DRAFT][max(modes[DraftingMode.DRAFT])].run([[1]], 3).outputs
    finally:
        system.close()
    assert outputs == [[[1, 96 + 16, 0]], [[2, 2 * (100 + 16), 0]] * 2]
    assert with_part == [[1, 96 + 16, 0, servers.NO_ID]]
    assert draft == [[1, 96 + 16, 4]]
    lookups = [json.loads(each)["speculative"] for each in modes[DraftingMode.LOOKUP]]
    types = [f"COMMON_SPECULATIVE_TYPE_NGRAM_{name}" for name in ("SIMPLE", "MAP_K", "MAP_K4V", "MOD", "CACHE")]
    assert [each["types"] for each in lookups[:5]] == [[each] for each in types]
    assert {"types": types[:1], "ngram_simple": {"size_n": 3, "size_m": 4}} in lookups
    drafts = [json.loads(each)["speculative"]["draft"] for each in modes[DraftingMode.DRAFT]]
    assert [(each["mparams"], each["n_max"]) for each in drafts] == [
        ({"path": "draft.gguf"}, 2),
        ({"path": "draft.gguf"}, 4),
    ]


VLLM = """
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
def option(name, default):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default
engine = subprocess.Popen(["sleep", "600"])
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.do_GET()
        length = json.loads(option("--speculative-config", "{}")).get("num_speculative_tokens", 0)
        for tokens in ([length, os.getpid()], [], [engine.pid]):
            event = {"choices": [{"token_ids": tokens if body["return_token_ids"] and body["ignore_eos"] else None}]}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
HTTPServer(("127.0.0.1", int(option("--port", ""))), Handler).serve_forever()
"""


def test_vllm_has_a_process_for_each_setting_and_all_end_with_their_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "MAX_SERVERS", 3)
    program = tmp_path / "vllm.py"
    program.write_text(VLLM)
    command, openmp = [sys.executable, "-S", str(program)], tmp_path / "libiomp5.so"
    system = VllmSystem(command, openmp, tmp_path / "target", Precision.BF16, LIMITS, tmp_path / "logs")
    modes = system.start()
    try:
        assert modes.keys() == {DraftingMode.PLAIN, DraftingMode.LOOKUP}
        plain, *lookups = [*modes[DraftingMode.PLAIN].values(), *modes[DraftingMode.LOOKUP].values()]
        outputs = [each.run([[1]] * 2, 3).outputs for each in (plain, lookups[0], lookups[1], plain)]
        assert all(first == second for first, second in outputs)
        assert outputs[0] == outputs[3]
        assert [each[0][0] for each in outputs] == [0, *LIMITS.draft_lengths, 0]
        running = {pid for each in outputs for pid in each[0][1:]}
        assert len(running) == 6
        assert all(map(is_running, running))
        others = [each.run([[1]], 3).outputs[0] for each in (lookups[2], plain, lookups[0])]
        assert others[1] == outputs[0][0]
        assert others[2] != outputs[1][0], "the longest unused process has ended"
        running.update(pid for each in others for pid in each[1:])
    finally:
        system.close()
        system.close()
    deadline = time.monotonic() + 10
    while any(map(is_running, running)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, running))


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_vllm_that_ends_says_where_to_look(tmp_path: Path) -> None:
    command, openmp = [sys.executable, "-S", "-c", "raise SystemExit(3)"], tmp_path / "libiomp5.so"
    system = VllmSystem(command, openmp, tmp_path / "target", Precision.BF16, LIMITS, tmp_path)
    with pytest.raises(RuntimeError, match=r"vllm ended with 3; see .*vllm-bf16\.log"):
        system.start()
    system.close()


def test_a_worker_answers_line_by_line_and_is_gone_afterwards(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", ECHO]
    modes: dict[DraftingMode, list[dict[str, int]]] = {DraftingMode.PLAIN: [{}]}
    system = WorkerSystem("echo bf16", "", command, modes, tmp_path / "logs" / "echo.log", 60.0)
    try:
        contenders = system.start()
        run = contenders[DraftingMode.PLAIN]["{}"].run(PROMPTS, 3)
    finally:
        system.close()
        system.close()
    assert run == ContenderRun([[1, 1, 1], [3, 3, 3]], 2.0, arrivals=[[0.5, 0.75], [0.5, 0.75]])


def test_a_worker_that_ends_says_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"mute ended with 3; see .*mute\.log"):
        Worker([sys.executable, "-S", "-c", "raise SystemExit(3)"], tmp_path / "mute.log", 60.0)


def test_a_worker_past_its_deadline_is_killed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="at its deadline"):
        Worker([sys.executable, "-S", "-c", "import time; time.sleep(600)"], tmp_path / "slow.log", 0.5)


def test_a_conversion_that_broke_off_is_done_again(tmp_path: Path, target_folder: Path) -> None:
    def fail(model: Path, out: Path) -> None:
        out.write_text("half")
        raise SystemExit("no space")

    def finish(model: Path, out: Path) -> None:
        out.write_text("whole")

    with pytest.raises(SystemExit):
        _convert_once(target_folder, tmp_path, "kind", fail)
    done = _convert_once(target_folder, tmp_path, "kind", finish)
    again = _convert_once(target_folder, tmp_path, "kind", fail)
    assert done == again
    assert done.read_text() == "whole"


def test_int8_weights_times_their_scales_are_the_matrices(target_folder: Path) -> None:
    projection, norm = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), torch.ones(8)
    names = ("layers.0.up_proj.weight", "layers.0.norm.weight")
    save_file(dict(zip(names, (projection, norm), strict=True)), target_folder / "model.safetensors")
    out = target_folder.parent / "int8"
    export_int8(target_folder, out)
    written = load_file(out / "model.safetensors")
    weight, scale = written[names[0]], written[f"{names[0]}_scale"]
    assert (weight.dtype, tuple(scale.shape)) == (torch.int8, (6, 1))
    assert ((weight * scale.float() - projection).abs() <= 0.6 * scale + 0.005 * projection.abs()).all()
    assert torch.equal(written[names[1]], norm)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["format"] == "int-quantized"


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder
