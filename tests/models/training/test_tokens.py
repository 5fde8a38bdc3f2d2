"""Windows and positions."""

import numpy as np
import torch

from models.training.tokens import TokenizedCorpus, WindowStream, measuring_windows, skipped_positions


def test_an_epoch_of_windows_predicts_every_token_once() -> None:
    corpus = TokenizedCorpus(library=[np.arange(97)], tests=[], chats=[])
    windows = WindowStream(corpus, seed=0).windows(12, 8)
    assert windows.shape == (12, 9)
    assert sorted(windows[:, 1:].flatten().tolist()) == list(range(1, 97))


def test_windows_come_in_random_order() -> None:
    corpus = TokenizedCorpus(library=[np.arange(97)], tests=[], chats=[])
    firsts = WindowStream(corpus, seed=0).windows(12, 8)[:, 0].tolist()
    assert firsts != sorted(firsts)


def test_measuring_predicts_every_token_once() -> None:
    windows = list(measuring_windows([np.arange(10)], num_tokens=4))
    assert torch.cat([window[0, 1:] for window in windows]).tolist() == list(range(1, 10))


def test_skipped_positions_grow_and_stay_inside_the_context() -> None:
    positions = skipped_positions(8, 64, torch.Generator().manual_seed(0))
    assert (positions.diff(dim=1) >= 1).all()
    assert positions.max() < 8192
    assert torch.equal(positions[0], torch.arange(64))
    assert ((positions.diff(dim=1) > 1).sum(1) <= 1).all()
