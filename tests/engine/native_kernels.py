"""Where tests of our kernels in C can run."""

from __future__ import annotations

import pytest

from engine.native_library import native_library

needs_kernels = pytest.mark.skipif(
    native_library() is None, reason="no native kernels here: not compiled, or no AVX-512 for bfloat16"
)
