"""The host issues passes at most two ahead of a device, whatever the passes compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.batch.span import Span
from engine.config import CacheConfig, ModelConfig, ModelDtype
from engine.model.runner.gpu_passes import PassQueue
from engine.model.runner.model_runner import ModelRunner
from tests.engine.fixtures.checkpoints import write_pair


class Device:
    """A device that finishes a pass only when the host waits for it."""

    def __init__(self) -> None:
        self.num_issued = self.num_finished = self.most_ahead = 0

    def new_event(self) -> Event:
        return Event(self)


class Event:
    """The end of one pass."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self) -> None:
        device = self._device
        device.num_issued += 1
        device.most_ahead = max(device.most_ahead, device.num_issued - device.num_finished)
        self._number = device.num_issued

    def synchronize(self) -> None:
        self._device.num_finished = max(self._device.num_finished, self._number)


def test_passes_over_a_prompt_wait_for_the_pass_before_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them has logits that anyone reads."""
    device = Device()
    monkeypatch.setattr(PassQueue, "of", lambda of: PassQueue(device.new_event))
    model = ModelConfig(str(write_pair(tmp_path, noise=0.05).target), ModelDtype.FLOAT32, "cpu")
    runner = ModelRunner(model, CacheConfig(4, num_blocks=16))
    for start in range(0, 24, 4):
        runner.forward([Span([5] * 4, start, list(range(6)), 0)])
    assert (device.num_issued, device.num_finished, device.most_ahead) == (6, 4, 2)


def test_a_processor_computes_a_pass_while_it_is_issued() -> None:
    assert PassQueue.of(torch.device("cpu")) is None
