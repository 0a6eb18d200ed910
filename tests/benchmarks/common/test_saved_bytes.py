"""Saved bytes: every storage that a backward needs counts once, from when it is saved until it is let go."""

import gc
from dataclasses import replace

import pytest
import torch
from benchmarks.common.saved_bytes import peak_saved_bytes, watch_saved_bytes
from benchmarks.tree.cases import build_model, star
from benchmarks.tree.steps import gradient_after, tree
from torch import Tensor

from tests.benchmarks.tree.trajectories import TINY

SHAPE = replace(TINY, num_layers=2, vocab_size=256)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float64, 8), (torch.bfloat16, 2)])
def test_a_graph_by_hand(dtype: torch.dtype, size: int) -> None:
    rows, weight = torch.ones(30, 40, dtype=dtype), torch.ones(50, 40, dtype=dtype, requires_grad=True)
    with watch_saved_bytes([weight]) as saved:
        hidden = (rows @ weight.T).relu()
        # The product needs its other factor, rows (the weight is left out, though it is saved as a view), and relu
        # its own result.
        assert saved.alive == size * (30 * 40 + 30 * 50)
        loss = (hidden * hidden.exp()).sum()
        # The square's factors: hidden, which counts already, and the result of exp, which exp saves too.
        assert saved.alive == saved.peak == size * (30 * 40 + 2 * 30 * 50)
        loss.backward()
        assert (saved.alive, saved.peak) == (0, size * (30 * 40 + 2 * 30 * 50))


def test_parameters_count_only_where_they_are_not_left_out() -> None:
    rows, weight = torch.ones(3, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)

    def step() -> None:
        (rows @ weight.T).sum().backward()

    assert peak_saved_bytes(step) == 4 * (3 * 4 + 5 * 4)
    assert peak_saved_bytes(step, [weight]) == 4 * 3 * 4
    assert peak_saved_bytes(step, [weight, rows]) == 0


def test_views_of_one_storage_count_once_and_whole() -> None:
    rows, weight = torch.ones(100, 4), torch.ones(5, 4, requires_grad=True)
    with watch_saved_bytes([weight]) as saved:
        first = (rows[:2] @ weight.T).sum()
        assert saved.alive == 4 * 100 * 4
        second = (rows[50:51] @ weight.T).sum()
        assert saved.alive == 4 * 100 * 4
        first.backward()
        assert saved.alive == 4 * 100 * 4
        second.backward()
        assert saved.alive == 0


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


def test_what_is_kept_counts_and_what_is_dropped_does_not() -> None:
    values = torch.ones(1000, requires_grad=True)
    with watch_saved_bytes() as saved:
        loss = values.exp().sum()
        loss.backward(retain_graph=True)
        assert saved.alive == 4000
    # The graph outlives the block, and so does its count.
    assert saved.alive == 4000
    del loss
    gc.collect()
    assert (saved.alive, saved.peak) == (0, 4000)
    # What is made after the block is none of it.
    (values.exp() * values.exp()).sum().backward()
    assert (saved.alive, saved.peak) == (0, 4000)


def test_each_tensor_is_let_go_when_its_operation_has_run_backward() -> None:
    alive: list[int] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, values: Tensor) -> Tensor:
            return values.clone()

        @staticmethod
        def backward(ctx: object, *grads: Tensor) -> Tensor:
            alive.append(saved.alive)
            return grads[0]

    values = torch.ones(10, requires_grad=True)
    with watch_saved_bytes() as saved:
        inner = Probe.apply(values).exp()
        Probe.apply(inner).exp().sum().backward()
    # Backwards: after the outer exp only the inner one's result is left, after that nothing.
    assert alive == [40, 0]


def test_a_storage_without_bytes_is_no_other_storage() -> None:
    empty, values = torch.ones(0, requires_grad=True), torch.ones(7, requires_grad=True)
    with watch_saved_bytes() as saved:
        losses = [empty.exp().sum(), values.exp().sum()]
        assert saved.alive == 28
        for loss in losses:
            loss.backward()
        assert saved.alive == 0


def test_a_tree_step_is_counted_without_being_changed() -> None:
    model, case = build_model(shape=SHAPE), star(prompt=9, response=4, group=3)
    step = tree(model, case)
    expected = gradient_after(model, step)
    with watch_saved_bytes(model.parameters()) as saved:
        assert torch.equal(gradient_after(model, step), expected)
    assert saved.alive == 0
    assert peak_saved_bytes(step, model.parameters()) == saved.peak > 0
    longer = tree(model, star(prompt=18, response=8, group=3))
    assert 1.8 < peak_saved_bytes(longer, model.parameters()) / saved.peak < 2.2
