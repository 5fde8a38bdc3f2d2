"""One cluster with one tiny pair for all tests of the served application."""

from collections.abc import Iterator

import pytest

from tests.serve.served_pair import ServedPair, serving
from tests.serve.tiny_models import write_pair

STEPS = {"judge": "likelihood", "think": None, "step_end": ".", "max_step_tokens": 12}  # for requests that ask


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPair]:
    folder = tmp_path_factory.mktemp("tiny")
    write_pair(folder)
    with serving(folder, speculation={"adaptive": False, "steps": STEPS}) as served_pair:
        yield served_pair
