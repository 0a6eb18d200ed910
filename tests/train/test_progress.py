"""A step's progress starts at 0, rises, ends at the total count, and changes no result."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.forests import SHAPES
from tests.models import build_float64, take_gradients
from tests.partitions import Parents, forced
from tests.train.gradient.test_backward import batch_of, forests_of
from tests.train.loop.runs import assert_bitwise_equal, tensors_of, tiny_loop
from tests.train.objectives.cases import CASES
from tests.train.objectives.flat_objectives import data_of
from treering.config.steps import RouterLosses
from treering.objectives import Objective, sft
from treering.train.loop.sft_loop import SftLoop
from treering.train.progress import OnProgress
from treering.train.step import BackwardResult, backward

Calls = list[tuple[str, int, int]]

MODEL = build_float64("mixtral")
GROUPS = [[[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 9]], SHAPES["duplicates"], [[1, 2, 5, 6], [1, 2, 5, 7]]]
BATCH = batch_of(GROUPS)


@pytest.fixture(autouse=True)
def clean_gradients() -> Iterator[None]:
    yield
    MODEL.zero_grad(set_to_none=True)


def heard(
    objective: Objective,
    max_tokens: int | None,
    parents: Parents = "keep",
    router_losses: RouterLosses | None = None,
) -> tuple[BackwardResult, dict[str, list[tuple[int, int]]]]:
    """Return a step and the counts of each phase in order; check that a step without a listener gives the same bits."""
    calls: Calls = []

    def step(on_progress: OnProgress | None) -> tuple[BackwardResult, dict[str, Tensor]]:
        result = backward(
            MODEL,
            forests_of(BATCH),
            objective,
            max_tokens,
            router_losses=router_losses,
            on_progress=on_progress,
        )
        return result, take_gradients(MODEL)

    with forced(parents):
        result, gradients = step(lambda *call: calls.append(call))
        _, no_warnings = step(None)
    assert all(torch.equal(gradients[name], no_warnings[name]) for name in no_warnings)
    return result, by_phase(calls)


def by_phase(calls: Calls) -> dict[str, list[tuple[int, int]]]:
    """Group the done and total counts by phase."""
    phases: dict[str, list[tuple[int, int]]] = {}
    for phase, done, total in calls:
        phases.setdefault(phase, []).append((done, total))
    return phases


def assert_rises(counts: list[tuple[int, int]], total: int) -> None:
    done, totals = zip(*counts, strict=True)
    assert set(totals) == {total}
    assert (done[0], done[-1]) == (0, total)
    assert list(done) == sorted(set(done))


@pytest.mark.parametrize(("max_tokens", "parents"), [(None, "keep"), (12, "keep"), (4, "keep"), (4, "recompute")])
def test_training_reaches_the_tokens_of_the_plan(max_tokens: int | None, parents: Parents) -> None:
    result, phases = heard(sft(BATCH.masks), max_tokens, parents)
    assert list(phases) == ["training"]
    assert_rises(phases["training"], result.plan.num_tokens)
    # One call at the start, and one per micro-batch and partition.
    assert len(phases["training"]) == result.plan.num_micro_batches + 1


def test_skipped_parts_that_train_nothing_count_as_done() -> None:
    masks = [[0] * len(mask) for mask in BATCH.masks]
    masks[-1][-1] = 1
    result, phases = heard(sft(masks), 4)
    assert_rises(phases["training"], result.plan.num_tokens)


@pytest.mark.parametrize("router_losses", [None, RouterLosses(balance=0.5)])
def test_passes_without_gradients_are_a_phase_of_their_own(router_losses: RouterLosses | None) -> None:
    data = data_of(GROUPS, MODEL, seed=7)
    result, phases = heard(CASES["gspo as in its paper"].make(data), 4, router_losses=router_losses)
    assert list(phases) == ["scoring", "training"]
    assert_rises(phases["scoring"], result.num_scoring_tokens)
    assert_rises(phases["training"], result.plan.num_tokens)
    assert len(phases["scoring"]) > 3


def test_a_loop_tells_each_step_and_trains_to_the_same_bits() -> None:
    calls: Calls = []
    loops: list[SftLoop] = []
    for on_progress in (lambda *call: calls.append(call), None):
        loop = tiny_loop(max_batch_tokens=60)
        loop.on_progress = on_progress
        sizes = [loop.step().update.num_tokens for _ in range(2)]
        loops.append(loop)
    assert [total for _, done, total in calls if done == total] == sizes
    assert_bitwise_equal(tensors_of(loops[0]), tensors_of(loops[1]))
