"""Waits, ages and orders are by monotonic clocks: setting the wall clock changes only dates."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGES = ("protos", "engine", "actors", "router", "cluster")
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
DATES = {  # files that need the date, or compare it with a file's date
    "actors/target/kv_event_publisher.py": "the date of an event, for subscribers",
    "actors/pair/auto_tune.py": "the date of a draft's file",
    "actors/pair/pair.py": "the date since which a draft runs, for operators",
    "actors/pair/pair_draft.py": "likewise",
    "actors/pair/pair_shell.py": "the date since which a head runs, for operators",
    "cluster/cli/commands/tune.py": "the date of a log's file",
    "engine/model/checkpoint/weight_files.py": "the age of a file's change",
    "engine/position_log/shard.py": "the date of a log's file",
    "router/api_keys.py": "the age of a file's change",
    "router/generation/generation.py": "`created` of an answer",
    "router/generation/generation_service.py": "`created` of the model",
    "router/grpc_api/vllm_engine.py": "the date of an answer",
    "router/metrics/tracing.py": "the dates of a trace",
    "router/tokenizer/chat_template.py": "the date that templates may ask for",
}


def test_wall_clocks_tell_dates_and_nothing_else() -> None:
    found = {
        str(path)
        for package in PACKAGES
        for path in Path(package).rglob("*.py")
        if any(ast.unparse(node) in WALL_CLOCKS for node in ast.walk(ast.parse(path.read_text())) if is_name(node))
    }
    assert found == set(DATES)


def is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
