"""The published checkpoint that tests of a real model share, fetched once; a test skips where it cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from models import smollm2
from router.tokenizer.tokenizer_files import TokenizerFiles, load_tokenizer_files


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct in bfloat16."""
    try:
        return smollm2.fetch()
    except (RuntimeError, ImportError) as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tokenizer_files(smollm2_folder: Path) -> TokenizerFiles:
    return load_tokenizer_files(str(smollm2_folder))
