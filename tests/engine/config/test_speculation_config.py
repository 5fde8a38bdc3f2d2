"""The speculation of a deployment, and of an engine without a proposer."""

import pytest

from engine.config import MAX_DRAFT_TOKENS, SpeculationConfig
from protos.errors import ConfigError


def test_an_engine_without_a_proposer_has_no_drafts_of_any_kind() -> None:
    off = SpeculationConfig(num_tokens=4).without_drafts()
    assert (off.num_tokens, off.max_num_tokens, off.free_draft_limit) == (0, 0, 0)
    assert not off.can_draft


def test_lengths_above_the_limit_of_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"speculation\.num_tokens is 17; it must be between 0 and"):
        SpeculationConfig(num_tokens=17)


def test_a_limit_that_no_pass_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"speculation\.max_num_tokens is 65; use 0 to 64"):
        SpeculationConfig(max_num_tokens=MAX_DRAFT_TOKENS + 1)
