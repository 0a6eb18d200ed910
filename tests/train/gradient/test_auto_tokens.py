"""`max_tokens="auto"` picks what fits in memory, and a step that runs out still gives the right gradients."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.forests import SHAPES
from tests.models import build_float64, take_gradients
from treering.model.context import tree_attention
from treering.model.tree_model import TreeModel
from treering.objectives import gspo, ppo, sft
from treering.train import memory, step
from treering.train.memory import DEFAULT_TOKENS, bytes_per_token, tokens_that_fit
from treering.train.step import backward
from treering.tree.forest import Forest

SEQUENCES = SHAPES["bushy"]
MASKS = [[0] + [1] * (len(sequence) - 1) for sequence in SEQUENCES]
FOREST = Forest.from_sequences(SEQUENCES)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    # Let the budget of this small forest be halved twice.
    monkeypatch.setattr(memory, "LEAST_TOKENS", 8)
    return build_float64("qwen3")


def begins_with(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treering.train.step.tokens_that_fit", lambda *_: tokens)


def runs_out(monkeypatch: pytest.MonkeyPatch, *, above: int, after: int) -> list[int]:
    """Let steps with a unit above `above` tokens run out of memory once `after` + 1 units have added gradients.

    Returns the largest unit of each step that ran out.
    """
    done: list[int] = []
    largest: list[int] = []
    whole, partitioned = step._Passes._run_whole, step._Passes._run_partitioned

    def guarded(original: Callable[..., None]) -> Callable[..., None]:
        def call(passes: Any, unit: Any, *args: Any) -> None:
            size = max((part.tokens.size for part in getattr(unit, "partitions", ())), default=unit.forest.num_tokens)
            done.append(size)
            original(passes, unit, *args)
            if max(done) > above and len(done) == after + 1:
                largest.append(max(done))
                done.clear()
                raise torch.OutOfMemoryError("CUDA out of memory")

        return call

    monkeypatch.setattr(step._Passes, "_run_whole", guarded(whole))
    monkeypatch.setattr(step._Passes, "_run_partitioned", guarded(partitioned))
    return largest


@pytest.mark.parametrize(("objective", "after"), [("entries", 0), ("entries", 1), ("branches", 1)])
def test_a_step_that_ran_out_of_memory_leaves_the_gradients_of_one_that_did_not(
    objective: str, after: int, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    forests = [FOREST, Forest.from_sequences([[3, 4]] * 2)]
    masks = [*MASKS, [0, 1], [0, 1]]
    make = {"entries": lambda: sft(masks), "branches": lambda: gspo([1.0, -1.0] * (len(masks) // 2), masks)}[objective]
    wanted_result = backward(model, forests, make())
    wanted = take_gradients(model)
    begins_with(FOREST.num_tokens, monkeypatch)
    seen = runs_out(monkeypatch, above=FOREST.num_tokens // 2, after=after)
    with pytest.warns(RuntimeWarning, match=rf"memory ran out with max_tokens={FOREST.num_tokens}"):
        result = backward(model, forests, make(), "auto")
    assert seen == [FOREST.num_tokens]
    assert result.plan.max_tokens is not None
    assert result.plan.max_tokens <= FOREST.num_tokens // 2
    assert result.loss == pytest.approx(wanted_result.loss, rel=1e-12)
    for name, gradient in take_gradients(model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-10, atol=1e-12)
    assert memory._BUDGETS[TreeModel.of(model).decoder]["stock"] == result.plan.max_tokens, "later steps begin there"


def test_gradients_of_an_earlier_step_are_never_dropped(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    backward(model, FOREST, sft(MASKS))
    begins_with(FOREST.num_tokens, monkeypatch)
    runs_out(monkeypatch, above=FOREST.num_tokens // 2, after=0)
    with pytest.raises(torch.OutOfMemoryError):
        backward(model, FOREST, sft(MASKS), "auto")
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_model_that_leaves_no_room_raises(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    begins_with(64, monkeypatch)
    runs_out(monkeypatch, above=0, after=0)
    with pytest.warns(RuntimeWarning, match="memory ran out"), pytest.raises(torch.OutOfMemoryError):
        backward(model, FOREST, sft(MASKS), "auto")


def test_a_number_stays_a_limit_and_is_never_tried_again(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    runs_out(monkeypatch, above=0, after=0)
    with pytest.raises(torch.OutOfMemoryError):
        backward(model, FOREST, sft(MASKS), 64)


@pytest.mark.parametrize("free_tokens", [16, 50_000])
@pytest.mark.parametrize("tied", [True, False])
def test_the_measured_number_leaves_room_for_the_gradients_that_are_to_come(
    free_tokens: int, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "LEAST_TOKENS", 8)
    model = build_float64("qwen3", tie_word_embeddings=tied)
    bound, values = TreeModel.of(model), nn.Linear(model.config.hidden_size, 1).double()
    weights = [*model.parameters(), *values.parameters()]
    size, vocab = model.config.hidden_size, model.config.vocab_size
    layers = sum(weight.numel() for layer in bound.layers for weight in layer.parameters())
    numbers = layers + size + (1 if tied else 2) * vocab * size + size + 1

    def found(tokens: float, num_bytes: int) -> int:
        room = tokens * bytes_per_token(bound) + num_bytes
        monkeypatch.setattr(memory, "free_memory", lambda device: room * 4 / 3)
        return memory._measured(bound, weights)

    # Numbers are multiples of 8, so a count that is a weight too high or too low changes one of the two.
    least, most = free_tokens + 0.001, free_tokens + 7.999
    with tree_attention(model):
        assert found(least, numbers * 8) == found(most, numbers * 8) == free_tokens
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        assert found(least, 0) == found(most, 0) == free_tokens, "gradients that exist are not counted again"
    assert tokens_that_fit(bound, weights) == DEFAULT_TOKENS, "on a CPU it is a fixed number"


def test_a_step_leaves_room_for_all_weights_of_the_model_and_of_a_value_head(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_float64("qwen3", tie_word_embeddings=False)
    values = nn.Linear(model.config.hidden_size, 1).double()
    counted: list[torch.Tensor] = []
    monkeypatch.setattr("treering.train.step.tokens_that_fit", lambda _, weights, __: counted.extend(weights) or 64)
    objective = ppo([1.0] * len(MASKS), MASKS, returns=[1.0] * len(MASKS))
    backward(model, FOREST, objective, "auto", value_head=values)
    wanted = [*model.parameters(), *values.parameters()]
    assert len(counted) == len(wanted)
    assert {id(weight) for weight in counted} == {id(weight) for weight in wanted}


def test_the_number_falls_when_an_optimizer_takes_memory_and_never_rises(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "LEAST_TOKENS", 1)
    monkeypatch.setattr(memory, "bytes_per_token", lambda bound: 1.0)
    bound = replace(TreeModel.of(model), device=torch.device("cuda"))
    found = []
    for free in (4000, 3000, 4000):
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        found.append(tokens_that_fit(bound, []))
    assert found == [3000, 2250, 2250]


def test_reference_cycles_of_a_failed_step_are_freed_before_the_cache_is_emptied(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    freed: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.extend(one() is None for one in held))

    def run(tokens: int) -> int:
        if held:
            return tokens
        cycle = [torch.zeros(3)]
        cycle.append(cycle)
        held.append(weakref.ref(cycle[0]))
        raise torch.OutOfMemoryError("CUDA out of memory")

    bound = replace(TreeModel.of(model), device=torch.device("cuda"))
    gc.disable()
    try:
        with pytest.warns(RuntimeWarning, match="memory ran out"):
            assert memory.run_by_memory(bound, [], run, lambda: 64) == 32
    finally:
        gc.enable()
    assert freed == [True]


def test_a_frozen_decoder_saves_nothing_and_takes_the_fixed_number(model: nn.Module) -> None:
    bound = TreeModel.of(model)
    bound.decoder.requires_grad_(False)
    with tree_attention(model):
        assert memory._measured(bound, model.parameters()) == DEFAULT_TOKENS
