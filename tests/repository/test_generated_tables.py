"""The pages list the keys that the schema has, and the metrics that replicas serve."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.repository.generated_tables import (
    DOCS,
    SCHEMA,
    generated_pages,
    key_names,
    key_table,
    metric_table,
    schema_text,
)

ROOT = Path(__file__).parents[2]
HEADER = "# yaml-language-server: $schema="


def test_the_pages_list_every_key_with_its_default_and_every_metric():
    for page, text in generated_pages().items():
        assert page.read_text(encoding="utf-8") == text, "run python -m tests.repository.generated_tables"
    assert "| `cache` | `block_size: 16`, `memory_gib`, " in key_table()
    assert "| `outrider_router_decisions{basis}` | Choices by" in metric_table()
    assert "| `outrider_spec_decode_class_draft_tokens_per_pos{class, method, position}` |" in metric_table()


def test_the_schema_for_editors_is_that_of_the_sections():
    assert SCHEMA.read_text(encoding="utf-8") == schema_text(), "run python -m tests.repository.generated_tables"


@pytest.mark.parametrize("name", ["deploy.yaml", "models/smollm2.deploy.yaml"])
def test_an_editor_accepts_our_files_and_marks_a_wrong_key(name: str):
    text = (ROOT / name).read_text(encoding="utf-8")
    header = next(line for line in text.splitlines() if line.startswith(HEADER))
    assert ((ROOT / name).parent / header.removeprefix(HEADER)).resolve() == SCHEMA.resolve()
    file = yaml.safe_load(text)
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert not list(validator.iter_errors(file))
    file["applications"][0]["args"]["cache"] = {"block_sise": 16}
    assert "block_sise" in next(validator.iter_errors(file)).message


def test_every_flag_of_another_server_leads_to_a_key_that_exists():
    page = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    settings = set(re.findall(r"--set ([\w.]+)=", page.partition("## Coming from another server")[2]))
    assert len(settings) > 15
    assert settings <= key_names()
