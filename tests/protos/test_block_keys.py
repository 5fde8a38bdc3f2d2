"""Block names: the ingress and the engine must agree on them for ever."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from protos.block_keys import block_keys, child_key, root_key

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
ROOT = root_key("model")


def test_keys_are_those_of_the_first_release() -> None:
    root = root_key("model", "tenant")
    assert root.hex() == "eaff68a967bce82b6ce53dfad9e99967"
    assert [key.hex() for key in block_keys([1, 2, 3, 4, 5], 2, root)] == [
        "6d4e74fda564042776584f0e3eb541bb",
        "4741e5c70f36dd1dbdff05b41054efdc",
    ]


@example([1, 2, 3, 4], 4)
@given(TOKENS, st.integers(1, 8))
def test_only_full_blocks_have_keys(token_ids: list[int], block_size: int) -> None:
    assert len(block_keys(token_ids, block_size, ROOT)) == len(token_ids) // block_size


@example([1, 2, 3, 4], [1, 2, 4, 3], 2)
@given(TOKENS, TOKENS, st.integers(1, 8))
def test_equal_keys_mean_equal_prefixes(left: list[int], right: list[int], block_size: int) -> None:
    pairs = zip(block_keys(left, block_size, ROOT), block_keys(right, block_size, ROOT), strict=False)
    for index, (left_key, right_key) in enumerate(pairs, start=1):
        end = index * block_size
        assert (left_key == right_key) == (left[:end] == right[:end])


@example([1, 2, 3], 2)
@given(TOKENS, st.integers(1, 8))
def test_growing_text_keeps_the_keys_of_its_beginning(token_ids: list[int], block_size: int) -> None:
    keys = block_keys(token_ids, block_size, ROOT)
    assert block_keys([*token_ids, 7, 7, 7], block_size, ROOT)[: len(keys)] == keys


def test_salt_and_model_version_separate_tenants_and_models() -> None:
    roots = {root_key("a"), root_key("b"), root_key("a", "x"), root_key("a", "y"), root_key("b", "x")}
    assert len(roots) == 5
    assert len({child_key(root, [1, 2]) for root in roots}) == 5
