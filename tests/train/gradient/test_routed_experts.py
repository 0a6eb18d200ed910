"""Routes of a rollout are replayed: gradients are those of flat sequences whose routers get their experts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tests.forests import sequence_sets
from tests.models import EXPERTS, assert_gradients_equal, build, build_float64, flat_logprobs, take_gradients
from tests.train.gradient.flat_routers import routers_of
from treering.errors import InputError, UnsupportedError
from treering.model.forward import forward
from treering.model.layers import enable_gradient_checkpointing
from treering.model.teacher import score
from treering.objectives import sft
from treering.train.step import backward
from treering.tree.forest import Forest

Routes = list[list[list[list[int]]]]  # by sequence, token, layer, then expert
LAYERS, NUM_EXPERTS, ACTIVE = 2, 4, 2


class ToldRouter(nn.Module):
    """Router with given experts for each token, written from the formula of mixtures of experts."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias = stock.weight, getattr(stock, "bias", None)
        self.told: list[list[int]] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
        chosen = torch.tensor(self.told)
        exponentials = logits.exp().gather(1, chosen)
        return logits, exponentials / exponentials.sum(-1, keepdim=True), chosen


@contextmanager
def told(model: nn.Module) -> Iterator[list[ToldRouter]]:
    names = [name for name, module in model.named_modules() if any(module is one for one in routers_of(model))]
    stock = [model.get_submodule(name) for name in names]
    routers = [ToldRouter(one) for one in stock]
    for name, router in zip(names, routers, strict=True):
        model.set_submodule(name, router)
    yield routers
    for name, router in zip(names, stock, strict=True):
        model.set_submodule(name, router)


def flat_loss(model: nn.Module, sequences: Sequence[list[int]], routes: Routes) -> Tensor:
    """Sum of minus log-probs over all tokens of all sequences but the first, each sequence computed alone."""
    total = torch.zeros((), dtype=torch.float64)
    with told(model) as routers:
        for sequence, own in zip(sequences, routes, strict=True):
            for layer, router in enumerate(routers):
                router.told = [experts[layer] for experts in own]
            total = total - flat_logprobs(model, sequence)[0].sum()
    return total


def some_routes(sequences: Sequence[list[int]], seed: int) -> Routes:
    """Routes of which some agree between sequences and some do not."""
    pairs = [[0, 1], [1, 0], [3, 2]]
    draw = np.random.default_rng(seed)
    return [[[pairs[draw.integers(3)] for _ in range(LAYERS)] for _ in sequence] for sequence in sequences]


def num_distinct(sequences: Sequence[list[int]], routes: Routes) -> int:
    paths = set()
    for sequence, own in zip(sequences, routes, strict=True):
        nodes = [(token, *map(frozenset, experts)) for token, experts in zip(sequence, own, strict=True)]
        paths |= {tuple(nodes[: stop + 1]) for stop in range(len(nodes))}
    return len(paths)


def assert_replayed(
    model: nn.Module,
    sequences: Sequence[list[int]],
    routes: Routes,
    max_tokens: int | None = None,
    *,
    flat_model: nn.Module | None = None,
) -> None:
    flat_model = flat_model or model
    expected = flat_loss(flat_model, sequences, routes)
    if expected.requires_grad:
        expected.backward()  # type: ignore[no-untyped-call]
    flat = take_gradients(flat_model)
    forest = Forest.from_sequences(sequences, routed_experts=routes)
    objective = sft([[1] * len(sequence) for sequence in sequences], normalizer="constant", divisor=1.0)
    result = backward(model, forest, objective, max_tokens)
    assert result.loss == pytest.approx(float(expected.detach()), rel=1e-10, abs=1e-10)
    assert_gradients_equal(take_gradients(model), flat, 1e-10)


MODEL = build_float64("qwen3_moe")


@given(sequences=sequence_sets(4, 6), seed=st.integers(0, 99))
@settings(max_examples=20)
def test_gradients_equal_those_of_flat_replay(sequences: list[list[int]], seed: int) -> None:
    assert_replayed(MODEL, sequences, some_routes(sequences, seed))


SHARED = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11], [5, 6, 7, 8, 9, 12, 13], [5, 6, 3]]


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("max_tokens", [None, 3])
def test_every_family_replays_whole_trees_and_partitions(family: str, max_tokens: int | None) -> None:
    routes: Routes = [[[[0, 3], [1, 2]] for _ in sequence] for sequence in SHARED]
    routes[1][2] = [[2, 3], [1, 2]]
    assert_replayed(build_float64(family), SHARED, routes, max_tokens)


@pytest.mark.parametrize("mode", ["non_reentrant", "reentrant"])
def test_checkpointed_layers_replay_in_their_recompute(mode: str) -> None:
    model = build_float64("qwen3_moe")
    enable_gradient_checkpointing(model, mode)
    assert_replayed(model, SHARED, some_routes(SHARED, 1), max_tokens=5, flat_model=build_float64("qwen3_moe"))


@given(sequences=sequence_sets(4, 6), seed=st.integers(0, 99))
@settings(max_examples=20)
def test_tokens_merge_if_they_and_all_before_them_were_routed_alike(sequences: list[list[int]], seed: int) -> None:
    routes = some_routes(sequences, seed)
    forest = Forest.from_sequences(sequences, routed_experts=routes)
    assert forest.num_tokens == num_distinct(sequences, routes)
    assert forest.routed_experts is not None
    for branch, (sequence, own) in enumerate(zip(sequences, routes, strict=True)):
        path = forest.path(branch)
        assert forest.tokens[path].tolist() == sequence
        assert forest.routed_experts[path].tolist() == np.sort(own).tolist()


def test_forests_keep_their_routes_when_they_are_joined_cut_and_taken_apart() -> None:
    routes = some_routes(SHARED, 2)
    forest = Forest.from_sequences(SHARED, routed_experts=routes)
    plain = Forest.from_sequences([[1, 2]])
    joined = Forest.concatenate([plain, forest])
    assert joined.routed_experts is not None
    assert forest.routed_experts is not None
    assert joined.routed_experts.tolist() == [[[-1] * 2] * 2] * 2 + forest.routed_experts.tolist()
    for tree, branches in zip(forest.trees(), forest.branches_by_tree(), strict=True):
        assert tree.routed_experts is not None
        for own, branch in enumerate(branches):
            assert tree.routed_experts[tree.path(own)].tolist() == forest.routed_experts[forest.path(branch)].tolist()
    taken = forest.take_branches([2, 0])
    assert taken.routed_experts is not None
    assert taken.routed_experts[taken.path(1)].tolist() == np.sort(routes[0]).tolist()


def test_routes_that_the_model_would_choose_change_nothing_and_cost_no_sharing() -> None:
    found: list[Tensor] = []
    handles = [
        router.register_forward_hook(lambda _m, _i, output: found.append(output[2])) for router in routers_of(MODEL)
    ]
    own = []
    for sequence in SHARED:
        found.clear()
        with torch.no_grad():
            MODEL(input_ids=torch.tensor([sequence]), use_cache=False)
        own.append(torch.stack(found, 1).numpy())
    for handle in handles:
        handle.remove()
    # An engine gives no route of the last token.
    replayed = Forest.from_sequences(SHARED, routed_experts=[routes[:-1] for routes in own])
    free = Forest.from_sequences(SHARED)
    with torch.no_grad():
        expected, actual = forward(MODEL, free).logprobs, forward(MODEL, replayed).logprobs
    for branch in range(len(SHARED)):
        torch.testing.assert_close(actual[replayed.path(branch)], expected[free.path(branch)], rtol=1e-12, atol=1e-12)
    whole = Forest.from_sequences(SHARED, routed_experts=own)
    assert whole.num_tokens == free.num_tokens


def test_after_a_replay_the_model_chooses_again() -> None:
    free = Forest.from_sequences(SHARED)
    with torch.no_grad():
        before = forward(MODEL, free).logprobs
        forward(MODEL, Forest.from_sequences(SHARED, routed_experts=some_routes(SHARED, 3)))
        assert torch.equal(forward(MODEL, free).logprobs, before)


def test_teachers_choose_their_own_experts() -> None:
    teacher = build("qwen3_moe", seed=1).eval()
    routed = Forest.from_sequences(SHARED, routed_experts=some_routes(SHARED, 4))
    free = Forest.from_sequences(SHARED)
    states = score(teacher, routed).hidden
    expected = score(teacher, free).hidden
    for branch in range(len(SHARED)):
        torch.testing.assert_close(states[routed.path(branch)], expected[free.path(branch)], rtol=1e-4, atol=1e-5)


def test_a_model_without_experts_refuses_routes() -> None:
    routed = Forest.from_sequences(SHARED, routed_experts=some_routes(SHARED, 4))
    with pytest.raises(UnsupportedError, match="routed_experts need a mixture of experts"):
        forward(build("qwen3"), routed)


def test_routes_that_do_not_fit_are_refused_by_name() -> None:
    def refuse(routes: object, words: str) -> None:
        with pytest.raises(InputError, match=words):
            forward(MODEL, Forest.from_sequences([[5, 6]], routed_experts=[routes]))

    refuse([[[0, 1]] * 3] * 2, r"2 of 4 experts in 2 layers for this model, got \[3, 2\]")
    refuse([[[0, 4]] * 2] * 2, "with expert 4")
    refuse([[0, 1]] * 2, "must be integers")
    refuse([[[0, 0]] * 2] * 2, "must name different experts")
    refuse([[[0, -1]] * 2] * 2, "must name different experts")
    with pytest.raises(InputError, match="one entry for each of 2 sequences"):
        Forest.from_sequences([[5], [6]], routed_experts=[None])
