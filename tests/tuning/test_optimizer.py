"""The optimiser: orthogonal updates and the schedule's shape."""

import torch

from tuning.train import orthogonalise, schedule


def test_orthogonalised_singular_values_are_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((16, 48), (48, 16)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)).float())
        assert values.min() > 0.4
        assert values.max() < 1.4


def test_schedule_warms_up_holds_and_decays_to_nothing() -> None:
    assert schedule(0.0) < 0.1
    assert schedule(0.3) == schedule(0.6) == 1.0
    assert schedule(1.0) == 0.0
