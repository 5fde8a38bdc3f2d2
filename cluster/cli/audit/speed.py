"""Speed: tokens per second and gaps from outside, next to the server's own figures."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from cluster.cli.audit.client import Server
from cluster.cli.audit.trial import PROMPTS, Audit, Trial
from cluster.cli.audit.wire import Answer, Body, NoVerdictError
from cluster.cli.figures import read_metrics

# Histograms of seconds per token, by vLLM's names, and Outrider's and SGLang's.
_PER_TOKEN = (
    "vllm:request_time_per_output_token_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:inter_token_latency_seconds",
    "outrider_inter_token_latency_seconds",
    "sglang:inter_token_latency_seconds",
    "sglang:time_per_output_token_seconds",
)


async def speed(audit: Audit, trial: Trial) -> None:
    """Stream texts one after the other, and compare the seconds per token with the server's metrics."""
    server = audit.server
    seen: list[float] = []
    gaps: list[float] = []
    reported: list[float] = []
    part = trial.hits(rate=0.9)
    for text in PROMPTS:
        if trial.is_enough():
            break
        # Measure one stream from outside, between two readings of the metrics.
        before = await _per_token(server)
        body = server.body(text, max_tokens=96, stream_options={"include_usage": True})
        times, number, claimed = await _stream(server, body)
        if number < 16 or len(times) < 2:  # too short for a speed
            continue
        seen.append((times[-1] - times[0]) / (number - 1))
        gaps += [after - earlier for earlier, after in pairwise(times)]
        after = await _per_token(server)
        if claimed is None and before and after and after[1] > before[1]:
            claimed = (after[0] - before[0]) / (after[1] - before[1])
        # A server flatters itself if a token takes twice the time that it reports.
        if claimed:
            reported.append(claimed)
            is_flattered = seen[-1] > 2.0 * claimed  # a stream's own overhead stays below twice its time
            slow = f"{1 / seen[-1]:.1f} tokens/s from outside" if is_flattered else None
            trial.hit(part, Answer(server.request(body), (), {}), f"the reported {1 / claimed:.1f} tokens/s", slow)
    if not seen:
        raise NoVerdictError("no streamed answer is long enough to measure")
    worst = sorted(gaps)[int(0.99 * (len(gaps) - 1))]
    trial.sentence = (
        f"{1 / median(seen):.1f} tokens/s from outside, "
        f"gaps p50 {1000 * median(gaps):.1f} ms, p99 {1000 * worst:.1f} ms"
    )
    if not reported:
        raise NoVerdictError(f"{trial.sentence}; the server reports no times per token")
    trial.sentence += f"; reported {1 / median(reported):.1f} tokens/s"


async def _stream(server: Server, body: Body) -> tuple[list[float], int, float | None]:
    """Return the times of texts, the number of tokens, and llama-server's own seconds per token."""
    times: list[float] = []
    number, claimed = 0, None
    async for now_s, event in server.stream(body):
        choices = event.get("choices") or [{}]
        delta: Any = choices[0].get("delta") or {}
        if choices[0].get("text") or delta.get("content"):
            times.append(now_s)
        number = int((event.get("usage") or {}).get("completion_tokens") or number)
        speed = (event.get("timings") or {}).get("predicted_per_second")
        claimed = 1 / speed if speed else claimed
    return times, number or len(times), claimed


async def _per_token(server: Server) -> tuple[float, float] | None:
    """Return the sum and the count of seconds per token so far."""
    parts = urlsplit(server.url)
    text = await server.text_of(f"{parts.scheme}://{parts.netloc}/metrics")
    try:
        reading = read_metrics(text or "")
    except ValueError:
        return None
    for name in _PER_TOKEN:
        if f"{name}_sum" in reading and f"{name}_count" in reading:
            return sum(reading[f"{name}_sum"].values()), sum(reading[f"{name}_count"].values())
    return None
