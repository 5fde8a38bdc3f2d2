"""The model that a deployment serves: its card, its fingerprint, and its drafts with the orders about them.

The fingerprint has one digest per input that the tokens of a seed may depend on: `or_` and one digest per part, joined
by `-`, in the order of `FingerprintPart`. A client that stores it with an answer can see later which part has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

from protos.messages import SamplingDefaults, VerifyMode

CHECK_TIMEOUT_S = 300.0  # for each pair to check a new draft
RETURN_S = 600.0  # for an old draft to serve again
ANSWER_S = 30.0  # more than a pair's own limit, for its answer to arrive
_PREFIX = "or_"  # of a fingerprint


class CanaryOutcome(StrEnum):
    """The state or the outcome of a canary."""

    RUNNING = "running"
    KEPT = "kept"  # the new draft is faster
    ROLLED_BACK = "rolled_back"  # it gains less than the minimum, no gain was shown, or a draft failed
    STOPPED = "stopped"  # by an admin; the old draft was restored


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """The measurements of a draft's trial against another one, running or finished.

    `gain` is the new goodput over the old, less 1; `low` and `high` are its bounds, None until measured.
    """

    path: str
    old_path: str
    outcome: CanaryOutcome
    reason: str = ""
    num_pairs: int = 0  # measured pairs of blocks: one block with each draft
    gain: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class DraftReport:
    """A draft model or head of a pair, for requests of `method`, that can be exchanged.

    `digest` is its part of the deployment's fingerprint. `is_deployed` is true for the draft of deploy.yaml, which a
    restarted replica runs again. `canary` is the last trial since the draft was exchanged by hand, `tuning` the state
    of the response to the latest drift alarm, if alarms are answered (`tune.auto`).
    """

    replica: str
    path: str
    digest: str
    since_s: float  # Unix time
    is_deployed: bool
    canary: CanaryReport | None = None
    tuning: str = ""
    method: str = "model"


@dataclass(frozen=True, slots=True)
class ShowDraft:
    """Report the draft without changing anything."""


@dataclass(frozen=True, slots=True)
class CheckDraft:
    """Load the checkpoint at `path` on the pair's node next to the running draft, and refuse an unfit one.

    In all orders, `method` names the draft to replace; empty for the deployment's own.
    """

    path: str
    method: str = ""


@dataclass(frozen=True, slots=True)
class SwapDraft:
    """Run the checkpoint at `path`; restore the old draft if the new one is not up within `wait_s`."""

    path: str
    wait_s: float
    method: str = ""


@dataclass(frozen=True, slots=True)
class TryDraft:
    """Alternate between the checkpoint at `path` and the current draft, and keep the faster. Returns at once.

    A block is `block_s` of the target's decoding steps with one draft. `min_gain`, the two error rates and `max_pairs`
    are described in `engine.accounting.goodput.GoodputTrial`. Without a verdict after `deadline_s` the old draft
    stays.
    """

    path: str
    wait_s: float = 120.0
    block_s: float = 5.0
    deadline_s: float = 7200.0
    min_gain: float = 0.05
    false_keep: float = 0.05
    false_rollback: float = 0.05
    max_pairs: int = 60
    method: str = ""


@dataclass(frozen=True, slots=True)
class StopCanary:
    """End the running canary, if any, and run the old draft."""


DraftOrder = ShowDraft | CheckDraft | SwapDraft | TryDraft | StopCanary


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The properties of a pair's model that an ingress needs; equal for every replica of one deployment."""

    vocab_size: int
    max_model_len: int  # of prompt and output together
    eos_token_ids: tuple[int, ...]
    model_version: str  # identifies the weights; part of every block key
    block_size: int  # tokens per KV block
    probe_key: bytes = b""  # the engine's key of the last block of `protos.block_keys.probe_token_ids`
    max_draft_tokens: int = 0  # the limit of `SpeculationParams.num_tokens`
    speculation_methods: tuple[str, ...] = ()  # a request may choose among them; the default is first
    verify: VerifyMode = VerifyMode.COUPLED  # the default for requests
    has_approximate_steps: bool = False  # a request may set `SpeculationParams.is_approximate`
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    alarms: tuple[str, ...] = ()  # of the replica that sent the card: degraded parts, in words
    fingerprint: str = ""  # changes with weights, draft, kernels and text settings; empty means model_version
    draft: DraftReport | None = None  # of the replica that sent the card, if its draft can be replaced


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
