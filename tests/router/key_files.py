"""Keys in a file, as an operator has them."""

from __future__ import annotations

import tempfile

from router.api_keys import ApiKeys


def api_keys(*lines: str) -> ApiKeys:
    """Return the keys of a file with these lines; the file is gone afterwards."""
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as file:
        file.write("\n".join(lines))
        file.flush()
        return ApiKeys(file.name)
