"""Copies next to the passes: their waits, and the memory that they use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch.side_stream import PendingTensor, arrived, pinned, side_stream

on_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda", 0)


class Card:
    """A log of a GPU's calls, in order, with their stream."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.stream = "engine's"

    def note(self, what: str) -> None:
        self.log.append(f"{what} on the {self.stream} stream")


class CardTensor(Tensor):
    """A tensor of the processor that passes for one of a card."""

    card: Card
    is_cuda = True
    device = CUDA
    __torch_function__ = torch._C._disabled_torch_function_impl

    def to(self, *_: Any, **__: Any) -> CardTensor:
        self.card.note("copy to the card")
        return self

    def record_stream(self, stream: Any) -> None:
        self.card.log.append(f"keep for the {stream.name} stream")


class CardStream:
    """A stream of a card without work."""

    def __init__(self, card: Card, name: str) -> None:
        self.card, self.name = card, name

    def wait_stream(self, other: CardStream) -> None:
        self.card.log.append(f"the {self.name} stream waits for the {other.name} stream")


class CardEvent:
    """An event of a card."""

    def __init__(self, card: Card) -> None:
        self.card = card

    def record(self, stream: CardStream) -> None:
        self.card.log.append(f"event on the {stream.name} stream")

    def synchronize(self) -> None:
        self.card.log.append("the host waits for the event")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    found = Card()
    empty = torch.empty

    @contextmanager
    def stream(used: CardStream) -> Iterator[None]:
        before, found.stream = found.stream, used.name
        yield
        found.stream = before

    def pinned_empty(*arguments: Any, pin_memory: bool, **settings: Any) -> Tensor:
        assert pin_memory
        found.note("copy to pinned memory")
        return empty(*arguments, **settings)

    monkeypatch.setattr(torch, "empty", pinned_empty)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: CardEvent(found))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: CardStream(found, found.stream))
    monkeypatch.setattr("engine.batch.side_stream.side_stream", lambda _: CardStream(found, "side"))
    return found


def on(card: Card, *numbers: float) -> CardTensor:
    tensor = torch.tensor(numbers).as_subclass(CardTensor)
    tensor.card = card
    return tensor


def test_a_tensor_is_read_on_the_side_stream_once_it_is_computed(card: Card) -> None:
    pending = PendingTensor(on(card, 1.0, 2.0))
    assert card.log == ["event on the engine's stream"], "making one has waited"
    assert pending.in_main_memory().tolist() == [1.0, 2.0]
    assert card.log[1:] == ["the host waits for the event", "copy to pinned memory on the side stream"]


def test_an_arriving_tensor_is_copied_on_the_side_stream_and_kept_for_the_engine(card: Card) -> None:
    arrived(on(card, 3.0), CUDA)
    assert card.log == [
        "copy to the card on the side stream",
        "the engine's stream waits for the side stream",
        "keep for the engine's stream",
    ]


def test_a_processor_reads_and_passes_on_the_tensor_itself() -> None:
    tensor, cpu = torch.arange(4), torch.device("cpu")
    pending = PendingTensor(tensor)
    assert pending.in_main_memory() is pending.on_device() is pinned(tensor, cpu) is arrived(tensor, cpu) is tensor


@on_card
def test_a_card_reads_a_tensor_while_it_computes_what_was_issued_later() -> None:
    left = torch.randn(8192, 8192, device=CUDA)
    pending = PendingTensor(torch.full((1 << 20,), 7, dtype=torch.uint8, device=CUDA))
    for _ in range(50):
        left @ left
    later = torch.cuda.Event()
    later.record()
    read = pending.in_main_memory()
    assert not later.query(), "the copy has waited for the products"
    assert read.is_pinned()
    assert int(read.sum()) == 7 << 20


@on_card
def test_memory_of_an_arrival_is_not_written_again_before_it_is_read() -> None:
    """Each arrival is freed at once, while the card has yet to copy it."""
    host = [pinned(torch.full((1 << 22,), number, dtype=torch.uint8), CUDA) for number in range(8)]
    left = torch.randn(8192, 8192, device=CUDA)
    kept = []
    for numbers in host:
        left @ left
        kept.append(arrived(numbers, CUDA).clone())
    assert [int(each.min()) for each in kept] == [int(each.max()) for each in kept] == list(range(8))
    assert side_stream(CUDA) is side_stream(torch.device("cuda"))
