"""The fingerprint of a deployment: one digest per input that the tokens of a seed may depend on.

The format is `or_` and one digest per part, joined by `-`, in the order of `FingerprintPart`. A client that stores it
with an answer can see later which part has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from hashlib import blake2b

_PREFIX = "or_"


class FingerprintPart(StrEnum):
    """The parts, in the order of their digests; the frontends add the last one."""

    WEIGHTS = "weights"
    DRAFT = "draft"
    KERNELS = "kernels"
    SETTINGS = "settings"
    TOKENIZER = "tokenizer"


def digest(*texts: str) -> str:
    """Return an eight-digit hexadecimal digest of these texts."""
    return blake2b("\0".join(texts).encode(errors="surrogatepass"), digest_size=4).hexdigest()


def write_fingerprint(digests: Mapping[FingerprintPart, str]) -> str:
    """Return a pair's fingerprint; the frontends append the tokenizer's digest."""
    return _PREFIX + "-".join(digests[part] for part in FingerprintPart if part in digests)


def with_tokenizer(fingerprint: str, tokenizer_digest: str) -> str:
    """Return a pair's fingerprint with the tokenizer's digest, replacing an earlier one."""
    return f"{fingerprint}-{tokenizer_digest}" if tokenizer_digest else fingerprint


def with_draft(fingerprint: str, *draft_digests: str) -> str:
    """Return a pair's fingerprint with the digest of its current draft, or of several."""
    digests = dict(zip(FingerprintPart, fingerprint.removeprefix(_PREFIX).split("-"), strict=False))
    draft = draft_digests[0] if len(draft_digests) == 1 else digest(digests[FingerprintPart.DRAFT], *draft_digests)
    return write_fingerprint({**digests, FingerprintPart.DRAFT: draft})


def read_fingerprint(fingerprint: str) -> dict[FingerprintPart, str] | None:
    """Return the digests of a fingerprint; None if it has another format."""
    digests = fingerprint.removeprefix(_PREFIX).split("-")
    if not fingerprint.startswith(_PREFIX) or len(digests) != len(FingerprintPart):
        return None
    return dict(zip(FingerprintPart, digests, strict=True))
