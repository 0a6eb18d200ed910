"""`max_tokens="auto"`: what fits by memory, and a step that runs out of it leaves the gradients of one that did not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.forests import SHAPES
from tests.models import build_float64, take_gradients
from treering.model.context import tree_attention
from treering.model.families import find_parts
from treering.train.gradient import auto_tokens, run
from treering.train.gradient.activations import bytes_per_token
from treering.train.gradient.auto_tokens import DEFAULT_TOKENS, tokens_that_fit
from treering.train.gradient.backward import backward
from treering.train.objectives import gspo, sft
from treering.tree.forest import Forest

SEQUENCES = SHAPES["bushy"]
MASKS = [[0] + [1] * (len(sequence) - 1) for sequence in SEQUENCES]
FOREST = Forest.from_sequences(SEQUENCES)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    # Budgets of this small forest, which may be halved twice.
    monkeypatch.setattr(auto_tokens, "LEAST_TOKENS", 8)
    return build_float64("qwen3")


def begins_with(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treering.train.gradient.backward.tokens_that_fit", lambda parts: tokens)


def runs_out(monkeypatch: pytest.MonkeyPatch, *, above: int, after: int) -> list[int]:
    """Memory runs out in steps with a unit of more than `above` tokens, when `after` + 1 units have added gradients.

    Returns the largest unit of each step that ran out.
    """
    done: list[int] = []
    largest: list[int] = []
    whole, partitioned = run.StepRun._run_whole, run.StepRun._run_partitioned

    def guarded(original: Callable[..., None]) -> Callable[..., None]:
        def call(step: run.StepRun, unit: Any, *args: Any) -> None:
            size = max((part.tokens.size for part in getattr(unit, "partitions", ())), default=unit.forest.num_tokens)
            done.append(size)
            original(step, unit, *args)
            if max(done) > above and len(done) == after + 1:
                largest.append(max(done))
                done.clear()
                raise torch.OutOfMemoryError("CUDA out of memory")

        return call

    monkeypatch.setattr(run.StepRun, "_run_whole", guarded(whole))
    monkeypatch.setattr(run.StepRun, "_run_partitioned", guarded(partitioned))
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
    with pytest.warns(RuntimeWarning, match=rf"memory ran out with {FOREST.num_tokens} tokens at a time"):
        result = backward(model, forests, make(), "auto")
    assert seen == [FOREST.num_tokens]
    assert result.plan.max_tokens is not None
    assert result.plan.max_tokens <= FOREST.num_tokens // 2
    assert result.loss == pytest.approx(wanted_result.loss, rel=1e-12)
    for name, gradient in take_gradients(model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-10, atol=1e-12)
    assert auto_tokens._BUDGETS[find_parts(model).decoder]["stock"] == result.plan.max_tokens, "later steps begin there"


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


@pytest.mark.parametrize("free_tokens", [10, 50_000])
def test_the_measured_number_fits_into_free_memory(
    free_tokens: int, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = find_parts(model)
    trained = sum(weight.numel() for weight in parts.decoder.parameters())
    with tree_attention(model):
        each = bytes_per_token(parts)
        # Gradients in float64, and 8 bytes of AdamW's.
        free = free_tokens * each * 4 / 3 + trained * 16 * 4 / 3
        monkeypatch.setattr(auto_tokens, "free_memory", lambda device: (free, None))
        found = auto_tokens._measured(parts)
    assert abs(found - free_tokens) <= 1
    assert tokens_that_fit(parts) == DEFAULT_TOKENS, "on a CPU it is a fixed number"


def test_a_frozen_decoder_saves_nothing_and_takes_the_fixed_number(model: nn.Module) -> None:
    parts = find_parts(model)
    parts.decoder.requires_grad_(False)
    with tree_attention(model):
        assert auto_tokens._measured(parts) == DEFAULT_TOKENS
