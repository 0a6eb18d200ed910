"""Saved bytes: every storage that a backward needs counts once, from when it is saved until it is released."""

from dataclasses import replace

import pytest
import torch
from benchmarks.common.saved_bytes import peak_saved_bytes, watch_saved_bytes

from tests.benchmarks.tree.trajectories import TINY

SHAPE = replace(TINY, num_layers=2, vocab_size=256)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float64, 8), (torch.bfloat16, 2)])
def test_a_graph_by_hand(dtype: torch.dtype, size: int) -> None:
    rows, weight = torch.ones(30, 40, dtype=dtype), torch.ones(50, 40, dtype=dtype, requires_grad=True)
    with watch_saved_bytes([weight]) as saved:
        hidden = (rows @ weight.T).relu()
        # The product saves its other factor, rows (the weight is not counted, although it is saved as a view), and relu
        # its own result.
        assert saved.alive == size * (30 * 40 + 30 * 50)
        loss = (hidden * hidden.exp()).sum()
        # The square's factors: hidden, which is counted already, and the result of exp, which exp saves too.
        assert saved.alive == saved.peak == size * (30 * 40 + 2 * 30 * 50)
        loss.backward()
        assert (saved.alive, saved.peak) == (0, size * (30 * 40 + 2 * 30 * 50))


def test_the_peak_is_of_one_time_and_not_a_sum_over_time() -> None:
    values = torch.ones(1000, requires_grad=True)

    def in_turn() -> None:
        for _ in range(3):
            values.exp().sum().backward()

    def together() -> None:
        losses = [values.exp().sum() for _ in range(3)]
        for loss in losses:
            loss.backward()

    def shrinking() -> None:
        large = values.exp().sum()
        large.backward()
        values[:10].exp().sum().backward()

    assert peak_saved_bytes(in_turn) == 4000
    assert peak_saved_bytes(together) == 12_000
    assert peak_saved_bytes(shrinking) == 4000
