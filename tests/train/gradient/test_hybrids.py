"""Laws 2 and 4 for models with recurrent layers; each typical error of state routing must fail the check."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forests import SHAPES, bushy, comb, star
from tests.hybrids import DENSE, HYBRIDS, PLANNINGS, build_wide, no_float32, planned
from tests.models import take_gradients
from tests.partitions import chain_partitions, random_partitions
from tests.train.flat import Batch, batches
from tests.train.gradient.test_backward import assert_step_is_exact, batch_of
from tests.train.gradient.test_partitioned import MODES, cut_by, gradients_of
from treering.attention.states import StateGateway, States
from treering.model.recurrence import plan, routing
from treering.model.recurrence.cache import CallCache
from treering.train.loop.compute import GradientCheckpointing, enable_gradient_checkpointing
from treering.tree.forest import Forest
from treering.tree.plan.partition import Partition

MODELS = {family: build_wide(family) for family in DENSE}
LONG = [[1] * 70 + [2] * 75, [1] * 70 + [3], [1] * 70 + [3, 4] * 40, [1] * 64 + [5] * 3, [1] * 2]


@pytest.fixture(autouse=True, scope="module")
def wide() -> Iterator[None]:
    with no_float32():
        yield
    for model in MODELS.values():
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("planning", PLANNINGS)
@given(batch=batches(), shared=st.sampled_from(["sum", "once"]))
@settings(max_examples=10)
def test_gradients_equal_those_of_flat_sequences(batch: Batch, shared: str, planning: str, family: str) -> None:
    with planned(planning):
        assert_step_is_exact(MODELS[family], batch, "dapo", "sequence_mean", shared)


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("tied", [True, False])
def test_every_family_is_exact_with_tied_and_untied_heads(family: str, tied: bool) -> None:
    model = build_wide(family, tie_word_embeddings=tied)
    assert_step_is_exact(model, batch_of([LONG, SHAPES["prefixes of each other"]]), "grpo", "token_mean")


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("planning", PLANNINGS)
@pytest.mark.parametrize(
    "sequences", [comb(40)[::2], star(40, 70, 2), bushy(12), LONG], ids=["comb", "star", "bushy", "long"]
)
def test_shapes_are_exact_whatever_the_plan(sequences: list[list[int]], planning: str, family: str) -> None:
    with planned(planning):
        assert_step_is_exact(build_wide(family, vocab_size=64), batch_of([sequences]), "dapo", "token_mean")


@pytest.mark.parametrize("family", DENSE)
@given(batch=batches(), seed=st.integers(0, 10**6), size=st.integers(1, 12))
@settings(max_examples=20)
def test_any_partition_gives_the_gradients_of_flat_sequences(batch: Batch, seed: int, size: int, family: str) -> None:
    with cut_by(lambda tree: random_partitions(tree, seed, size)):
        assert_step_is_exact(MODELS[family], batch, "dapo", "sequence_mean")


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("planning", ["fork, padded", "rescan"])
@pytest.mark.parametrize("size", [1, 3, 40])
def test_partitions_are_exact_whatever_the_plan(size: int, planning: str, family: str) -> None:
    batch = batch_of([bushy(4)]) if size < 40 else batch_of([LONG, bushy(12)])
    with planned(planning), cut_by(lambda tree: random_partitions(tree, 1, size, cut=0.1)):
        assert_step_is_exact(MODELS[family], batch, "dapo", "sequence_mean")


@pytest.mark.parametrize("family", HYBRIDS)
def test_every_family_is_exact_in_partitions(family: str) -> None:
    batch = batch_of([SHAPES["long segments"], SHAPES["prefixes of each other"]])
    with cut_by(lambda tree: random_partitions(tree, 1, 20, cut=0.05)):
        assert_step_is_exact(build_wide(family), batch, "grpo", "sequence_mean", temperature=0.8)


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_chain_of_partitions_is_exact(size: int, family: str) -> None:
    batch = batch_of([[[i % 7 for i in range(30)]]])
    with cut_by(lambda tree: chain_partitions(tree.num_tokens, size)):
        assert_step_is_exact(MODELS[family], batch, "sft", "sum")


@pytest.mark.parametrize("family", DENSE)
@given(batch=batches(), seed=st.integers(0, 10**6), size=st.integers(1, 12))
@settings(max_examples=10)
def test_keeping_and_recomputing_parents_agree_bit_for_bit(batch: Batch, seed: int, size: int, family: str) -> None:
    model = MODELS[family]
    kept, again = (gradients_of(model, batch, lambda tree: random_partitions(tree, seed, size), mode) for mode in MODES)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("checkpointing", ["reentrant", "non_reentrant"])
@pytest.mark.parametrize("parents", MODES)
def test_activation_checkpointing_in_partitions_changes_nothing(
    parents: str, checkpointing: GradientCheckpointing, family: str
) -> None:
    batch = batch_of([SHAPES["long segments"]])
    cut: Callable[[Forest], tuple[Partition, ...]] = lambda tree: random_partitions(tree, 3, 30, cut=0.03)  # noqa: E731
    expected = gradients_of(build_wide(family), batch, cut, "keep")
    model = build_wide(family)
    enable_gradient_checkpointing(model, checkpointing)
    actual = gradients_of(model, batch, cut, parents)  # type: ignore[arg-type]
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-12, rtol=1e-10)


def unrouted_state(patch: pytest.MonkeyPatch) -> None:
    """Every run starts from a zero state."""
    honest = routing._started

    def fresh(above: States | None, call: plan.RowCall) -> States | None:
        states = honest(above, call)
        return None if states is None else States(torch.zeros_like(states.recurrent), states.context)

    patch.setattr(routing, "_started", fresh)


def context_of_zeros(patch: pytest.MonkeyPatch) -> None:
    """The convolution starts from zeros after a fork."""
    honest = routing._started

    def fresh(above: States | None, call: plan.RowCall) -> States | None:
        states = honest(above, call)
        return None if states is None else States(states.recurrent, torch.zeros_like(states.context))

    patch.setattr(routing, "_started", fresh)


def context_of_another_row(patch: pytest.MonkeyPatch) -> None:
    """The convolution's context is that of the neighbouring row, the tokens before it in packed order."""
    honest = routing._started

    def beside(above: States | None, call: plan.RowCall) -> States | None:
        states = honest(above, call)
        return None if states is None else States(states.recurrent, states.context.roll(1, 0))

    patch.setattr(routing, "_started", beside)


def state_of_the_wrong_sibling(patch: pytest.MonkeyPatch) -> None:
    """Runs start from the state of the level's other rows."""
    honest = plan._call

    def wrong(tokens: np.ndarray, length: np.ndarray, start: np.ndarray, kept: np.ndarray, device: torch.device):  # type: ignore[no-untyped-def]
        return honest(tokens, length, np.where(start > 0, start - 1, start), kept, device)

    patch.setattr(plan, "_call", wrong)


def state_behind_the_padding(patch: pytest.MonkeyPatch) -> None:
    """The state of a padded row has seen its padding."""
    honest = plan._call

    def open_gates(*args: object) -> plan.RowCall:
        call = honest(*args)  # type: ignore[arg-type]
        object.__setattr__(call, "padding", None)
        return call

    patch.setattr(plan, "_call", open_gates)


def context_behind_the_padding(patch: pytest.MonkeyPatch) -> None:
    """The convolution's context is the end of the call, not of the row."""
    honest = CallCache.ends

    def at_the_end(self: CallCache, rows: torch.Tensor, length: torch.Tensor) -> States:
        return honest(self, rows, torch.full_like(length, self._num_new))

    patch.setattr(CallCache, "ends", at_the_end)


def no_gradient_into_states(patch: pytest.MonkeyPatch) -> None:
    """States are passed on detached."""
    honest = CallCache.ends

    def detached(self: CallCache, rows: torch.Tensor, length: torch.Tensor) -> States:
        return States(*(part.detach() for part in honest(self, rows, length)))

    patch.setattr(CallCache, "ends", detached)


def drop_gateway_gradients(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Gradients from partitions below for the state, or for the context, are lost."""

    def drop(patch: pytest.MonkeyPatch) -> None:
        honest = StateGateway.add_gradient

        def deaf(self: StateGateway, layer: int, which: str, slots: torch.Tensor, gradient: torch.Tensor) -> None:
            honest(self, layer, which, slots, 0 * gradient if which == name else gradient)

        patch.setattr(StateGateway, "add_gradient", deaf)

    drop.__name__ = f"drop_gateway_gradient_of_{name}"
    return drop


def runs_that_ignore_the_boundary(patch: pytest.MonkeyPatch) -> None:
    """Partitions export the state of the wrong boundary token."""
    honest = plan.plan_schedule

    def reversed_slots(*args: object) -> plan.RecurrencePlan:
        made = honest(*args)  # type: ignore[arg-type]
        object.__setattr__(made, "left", made.left.flip(0))
        return made

    patch.setattr(plan, "plan_schedule", reversed_slots)


SEQUENCES = [
    [3, 1, 4, 1, 5, 9, 2, 6],
    [3, 1, 4, 1, 5, 9, 2, 8, 8],
    [3, 1, 7, 7, 2],
    [3, 1, 7, 7, 3, 3],
    [3, 1, 8],
]
FORKS = batch_of([SEQUENCES])
FORKS = Batch(
    groups=FORKS.groups,
    masks=[[1] * len(sequence) for sequence in FORKS.sequences],
    advantages=[1.5, -1.0, 0.5, 2.0, -0.3],
    old_logprobs=FORKS.old_logprobs,
)
IN_FORESTS = [
    unrouted_state,
    context_of_zeros,
    context_of_another_row,
    state_of_the_wrong_sibling,
    state_behind_the_padding,
    context_behind_the_padding,
    no_gradient_into_states,
]
IN_PARTITIONS = [
    *(unrouted_state, context_of_zeros, runs_that_ignore_the_boundary),
    *(drop_gateway_gradients("recurrent"), drop_gateway_gradients("context")),
]


def cut_small(tree: Forest) -> tuple[Partition, ...]:
    """The first five tokens are the top partition, all others one partition below."""
    top = np.arange(tree.num_tokens) < 5
    numbers = [np.flatnonzero(chosen).astype(np.int32) for chosen in (top, ~top)]
    return (Partition(tokens=numbers[0], parent=-1), Partition(tokens=numbers[1], parent=0))


@pytest.mark.parametrize("family", DENSE)
def test_the_honest_step_passes(family: str) -> None:
    with planned("fork, padded"):
        assert_step_is_exact(MODELS[family], FORKS, "sft", "token_mean")
    with cut_by(cut_small):
        assert_step_is_exact(MODELS[family], FORKS, "sft", "token_mean")


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("mutate", IN_FORESTS, ids=lambda mutate: mutate.__name__)
def test_each_trap_breaks_law_2(
    mutate: Callable[[pytest.MonkeyPatch], None], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with planned("fork, padded"), pytest.raises(AssertionError):
        assert_step_is_exact(MODELS[family], FORKS, "sft", "token_mean")
    take_gradients(MODELS[family])


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("mutate", IN_PARTITIONS, ids=lambda mutate: mutate.__name__)
def test_each_trap_breaks_law_4(
    mutate: Callable[[pytest.MonkeyPatch], None], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with cut_by(cut_small), pytest.raises(AssertionError):
        assert_step_is_exact(MODELS[family], FORKS, "sft", "token_mean")
    take_gradients(MODELS[family])
