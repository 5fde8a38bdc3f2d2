"""Errors that transformers raises for a checkpoint that it does not understand."""

from __future__ import annotations

from huggingface_hub.errors import StrictDataclassError

READING_ERRORS = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, ImportError),
    AssertionError,
    StrictDataclassError,
)
