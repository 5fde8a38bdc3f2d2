"""The placement of a prompt, for loads with an obvious answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.remote_prefill.placement import LocalOutlook, RemoteOutlook, place_prefill

RATE = 1000.0
IDLE = LocalOutlook(RATE, slowdown=0.0, num_queued_tokens=0, num_decoding=0)
FREE = RemoteOutlook(RATE, num_queued_tokens=0.0, call_s=0.01, transfer_s_per_token=1e-5)


def is_remote(num_tokens: int, local: LocalOutlook = IDLE, remote: RemoteOutlook = FREE) -> bool:
    return place_prefill(num_tokens, 100, local, remote).is_remote


def test_a_long_prompt_goes_to_a_free_replica_and_a_short_one_never() -> None:
    assert is_remote(2000)
    assert is_remote(100)
    assert not is_remote(99)
    assert not is_remote(99, replace(IDLE, num_decoding=50))


def test_a_long_remote_queue_keeps_a_prompt_here() -> None:
    assert is_remote(2000, remote=replace(FREE, num_queued_tokens=1900.0))
    assert not is_remote(2000, remote=replace(FREE, num_queued_tokens=2100.0))


def test_sequences_that_decode_here_outweigh_a_remote_queue() -> None:
    busy = replace(FREE, num_queued_tokens=5000.0)
    assert not is_remote(2000, remote=busy)
    assert is_remote(2000, replace(IDLE, num_decoding=3), busy)


def test_decode_load_and_a_queue_here_push_prompts_out() -> None:
    busy = replace(FREE, num_queued_tokens=3000.0)
    assert is_remote(2000, replace(IDLE, slowdown=1.0), busy)
    assert is_remote(2000, replace(IDLE, num_queued_tokens=2000), busy)


def test_a_slow_way_or_a_slow_machine_keeps_prompts_here() -> None:
    assert not is_remote(2000, remote=replace(FREE, transfer_s_per_token=2e-3))
    assert not is_remote(200, remote=replace(FREE, call_s=0.5))
    assert is_remote(2000, remote=replace(FREE, tokens_per_s=RATE / 1.5))
    assert not is_remote(2000, remote=replace(FREE, tokens_per_s=RATE / 3))


def test_prompts_go_to_replicas_before_rates_are_measured() -> None:
    nothing = RemoteOutlook(0.0, 0.0, 0.0, 0.0)
    assert is_remote(2000, replace(IDLE, tokens_per_s=0.0), nothing)
    assert is_remote(2000, IDLE, nothing)
    assert is_remote(2000, replace(IDLE, tokens_per_s=0.0), FREE)


def test_a_placement_prints_its_numbers() -> None:
    choice = place_prefill(2000, 100, replace(IDLE, num_decoding=1), FREE)
    assert (choice.local_s, choice.remote_s) == (pytest.approx(4.0), pytest.approx(0.03))
    assert str(choice) == "remote prefill of 2000 tokens: here 4.000 s, there 0.030 s"
