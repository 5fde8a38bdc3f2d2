"""The rates of the simulated hardware: the assumptions behind every simulated figure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServingRates:
    """Rates of one worker; the defaults are those of a 70 B model on 8 GPUs, rounded.

    Attributes:
        prefill_tokens_per_s: uncached prompt tokens computed per second with nothing decoding.
        decode_slowdown: extra prefill seconds per second and decoding context token: 100,000 tokens of context in
            decode make prefill 5% slower (reading their KV, 4 ms of an 80 ms step).
        decode_tokens_per_s: tokens per second of one running stream.
        kv_transfer_tokens_per_s: tokens of KV that move between two workers per second.
        kv_transfer_latency_s: time before the first of them arrives.
    """

    prefill_tokens_per_s: float = 10_000.0
    decode_slowdown: float = 5e-7
    decode_tokens_per_s: float = 40.0
    kv_transfer_tokens_per_s: float = 75_000.0
    kv_transfer_latency_s: float = 0.005

    def prefill_s(self, num_tokens: int, num_decode_tokens: int) -> float:
        """Seconds to compute `num_tokens` beside streams of `num_decode_tokens` tokens of context."""
        return num_tokens / self.prefill_tokens_per_s * (1.0 + self.decode_slowdown * num_decode_tokens)

    def decode_s(self, num_tokens: int) -> float:
        """Seconds that a stream of `num_tokens` tokens runs after its first."""
        return num_tokens / self.decode_tokens_per_s

    def transfer_s(self, num_tokens: int) -> float:
        """Seconds for the KV of `num_tokens` tokens to arrive."""
        return self.kv_transfer_latency_s + num_tokens / self.kv_transfer_tokens_per_s
