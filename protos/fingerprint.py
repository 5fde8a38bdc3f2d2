"""The fingerprint of a deployment: a digest for each thing that the tokens of a seed may depend on.

`or_` and one digest per part, joined by `-`, in the order of `FingerprintPart`. A client that keeps it with an answer
learns later which part has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from hashlib import blake2b

_PREFIX = "or_"


class FingerprintPart(StrEnum):
    """The parts, in the order in which they are written; the frontends know the last one alone."""

    WEIGHTS = "weights"
    DRAFT = "draft"
    KERNELS = "kernels"
    SETTINGS = "settings"
    TOKENIZER = "tokenizer"


def digest(*texts: str) -> str:
    """Return eight hexadecimal digits that stand for these texts."""
    return blake2b("\0".join(texts).encode(errors="surrogatepass"), digest_size=4).hexdigest()


def write_fingerprint(digests: Mapping[FingerprintPart, str]) -> str:
    """Return the fingerprint of a pair; that of its tokenizer is added by the frontends."""
    return _PREFIX + "-".join(digests[part] for part in FingerprintPart if part in digests)


def with_tokenizer(fingerprint: str, tokenizer_digest: str) -> str:
    """Return a pair's fingerprint with the digest of the tokenizer that stands before it, where there is one."""
    return f"{fingerprint}-{tokenizer_digest}" if tokenizer_digest else fingerprint


def with_draft(fingerprint: str, *draft_digests: str) -> str:
    """Return a pair's fingerprint with the digest of the draft that it runs now, or with those of several."""
    digests = dict(zip(FingerprintPart, fingerprint.removeprefix(_PREFIX).split("-"), strict=False))
    draft = draft_digests[0] if len(draft_digests) == 1 else digest(digests[FingerprintPart.DRAFT], *draft_digests)
    return write_fingerprint({**digests, FingerprintPart.DRAFT: draft})


def read_fingerprint(fingerprint: str) -> dict[FingerprintPart, str] | None:
    """Return the digests of a fingerprint; None where it is not one of these."""
    digests = fingerprint.removeprefix(_PREFIX).split("-")
    if not fingerprint.startswith(_PREFIX) or len(digests) != len(FingerprintPart):
        return None
    return dict(zip(FingerprintPart, digests, strict=True))
