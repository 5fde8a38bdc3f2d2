"""The parts of large JSON texts are counted outside their strings."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protos import client_text
from protos.client_text import check_parts
from protos.errors import RequestError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a"\\[]{}:, \n', max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\:,', max_size=3), inner, max_size=4),
    max_leaves=12,
)


def counts(value: object) -> tuple[int, int]:
    """Return the commas between values, and the lists, objects, fields and texts, keys included."""
    match value:
        case str():
            return 0, 1
        case list():
            own, inner = (max(0, len(value) - 1), 1), value
        case dict():
            own, inner = (max(0, len(value) - 1), 1 + 2 * len(value)), list(value.values())
        case _:
            return 0, 0
    parts = [own, *map(counts, inner)]
    return sum(commas for commas, _ in parts), sum(number for _, number in parts)


@given(VALUES)
@example(["\\"])  # a backslash before the quote that ends the text
@example({'\\"': ',"[{'})
@example([[], {}, ""])
def test_what_is_in_texts_does_not_count(value: object) -> None:
    text = json.dumps(value).encode()
    num_commas, num_parts = counts(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_text, "_MAX_VALUES", num_commas + 1)
        patch.setattr(client_text, "MAX_PARTS", num_parts)
        check_parts(text, "it")
        patch.setattr(client_text, "_MAX_VALUES", num_commas)
        with pytest.raises(RequestError, match=f"it holds {num_commas + 1} values"):
            check_parts(text, "it")
        patch.setattr(client_text, "_MAX_VALUES", num_commas + 1)
        patch.setattr(client_text, "MAX_PARTS", num_parts - 1)
        with pytest.raises(RequestError, match=f"it holds {num_parts} lists"):
            check_parts(text, "it")


def test_a_long_text_and_a_million_token_ids_pass() -> None:
    check_parts(json.dumps({"prompt": 'a, "b": [{' * 700_000}).encode(), "it")
    check_parts(json.dumps({"prompt": [12345] * (1 << 20)}).encode(), "it")


def test_a_short_text_is_not_counted() -> None:
    check_parts(b"[" * client_text.MAX_PARTS, "it")
    with pytest.raises(RequestError):
        check_parts(b"[" * (client_text.MAX_PARTS + 1), "it")
