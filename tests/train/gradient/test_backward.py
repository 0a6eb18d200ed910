"""Law 2, gradients: a tree step equals training every branch as a flat sequence, whatever differs on shared tokens."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.backends import EXACT_BACKENDS
from tests.forests import SHAPES, comb, star
from tests.models import FAMILIES, assert_gradients_equal, build, build_float64, global_norm, take_gradients
from tests.train.flat import Batch, batches, flat_loss
from treering.attention import dispatch
from treering.errors import ConfigError, InputError, StateError
from treering.model.forward import forward
from treering.model.layers import enable_gradient_checkpointing
from treering.objectives import Objective, dapo, grpo, gspo, sft
from treering.train.step import backward
from treering.tree.forest import Forest

MODEL = build_float64()
NORMALIZERS = ["token_mean", "sequence_mean", "tree_mean", "constant", "sum"]
SHARED = ["sum", "once"]
KINDS = ["sft", "grpo", "dapo"]
CLIPS = {"sft": (0.2, 0.2), "grpo": (0.2, 0.2), "dapo": (0.2, 0.28)}
EXACT = 1e-10
GOOD = Forest.from_sequences([[1, 2, 3], [1, 2, 4], [5]])


def objective_of(kind: str, batch: Batch, normalizer: str, shared: str) -> Objective:
    options = {"normalizer": normalizer, "shared": shared, "divisor": 7.0 if normalizer == "constant" else None}
    if kind == "sft":
        return sft(batch.masks, **options)  # type: ignore[arg-type]
    make: Callable[..., Objective] = {"grpo": grpo, "dapo": dapo}[kind]
    return make(batch.advantages, batch.masks, batch.old_logprobs, **options)


def assert_step_is_exact(
    model: nn.Module,
    batch: Batch,
    kind: str,
    normalizer: str,
    shared: str = "sum",
    *,
    tolerance: float = EXACT,
    max_tokens: int | None = None,
    temperature: float = 1.0,
    backend: str = "auto",
) -> None:
    """Check law 2 for one batch: the loss and every parameter's gradient."""
    expected = flat_loss(
        model,
        batch,
        kind=kind,
        normalizer=normalizer,
        shared=shared,
        clip=CLIPS[kind],
        divisor=7.0,
        temperature=temperature,
    )
    if expected.requires_grad:
        expected.backward()  # type: ignore[no-untyped-call]
    expected_gradients = take_gradients(model)
    result = backward(
        model,
        forests_of(batch),
        objective_of(kind, batch, normalizer, shared),
        max_tokens,
        temperature=temperature,
        backend=backend,
    )
    assert result.loss == pytest.approx(float(expected.detach()), rel=tolerance, abs=tolerance)
    assert_gradients_equal(take_gradients(model), expected_gradients, tolerance)


def batch_of(groups: list[list[list[int]]], seed: int = 0) -> Batch:
    """Return a batch with random masks, advantages and old log-probs, all different on shared tokens."""
    generator = torch.Generator().manual_seed(seed)
    sequences = [sequence for group in groups for sequence in group]
    return Batch(
        groups=groups,
        masks=[torch.randint(0, 2, (len(s),), generator=generator).tolist() for s in sequences],
        advantages=torch.randn(len(sequences), generator=generator).tolist(),
        old_logprobs=[(-3 + torch.randn(len(s), generator=generator)).clamp(max=0).tolist() for s in sequences],
    )


@pytest.mark.parametrize("kind", KINDS)
@given(batch=batches(), normalizer=st.sampled_from(NORMALIZERS), shared=st.sampled_from(SHARED))
@settings(max_examples=25)
def test_gradients_equal_those_of_flat_sequences(kind: str, batch: Batch, normalizer: str, shared: str) -> None:
    assert_step_is_exact(MODEL, batch, kind, normalizer, shared)


@given(
    batch=batches(max_groups=3),
    spare=st.integers(0, 10),
    normalizer=st.sampled_from(NORMALIZERS),
    shared=st.sampled_from(SHARED),
)
@settings(max_examples=15)
def test_micro_batches_change_nothing(batch: Batch, spare: int, normalizer: str, shared: str) -> None:
    trees = [tree for group in batch.groups for tree in Forest.from_sequences(group).trees()]
    budget = max(tree.num_tokens for tree in trees) + spare
    assert_step_is_exact(MODEL, batch, "dapo", normalizer, shared, max_tokens=budget)


@pytest.mark.parametrize(
    ("family", "tied", "backend"),
    [
        *((family, bool(i % 2), "segments") for i, family in enumerate(FAMILIES)),
        *((family, bool(i % 2), "reference") for i, family in enumerate(("gemma2", "gpt_oss", "qwen3"))),
    ],
)
def test_every_family_and_backend_is_exact(family: str, tied: bool, backend: str) -> None:
    model = build_float64(family, tie_word_embeddings=tied)
    batch = batch_of([SHAPES["long segments"], SHAPES["prefixes of each other"]])
    assert_step_is_exact(model, batch, "grpo", "sequence_mean", backend=backend, temperature=0.8)


@pytest.mark.parametrize(
    ("sequences", "max_tokens"),
    [(comb(1000)[199::200], None), (comb(1000)[249::250], 100), (star(600), 100)],
    ids=["deep", "deep, in partitions", "wide, in partitions"],
)
def test_deep_and_wide_trees_are_exact(sequences: list[list[int]], max_tokens: int | None) -> None:
    model = build_float64(vocab_size=1024)
    assert_step_is_exact(model, batch_of([sequences]), "dapo", "token_mean", max_tokens=max_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_code_in_float64_stays_within_1e_6(family: str) -> None:
    model = build(family).double()
    assert_step_is_exact(model, batch_of([SHAPES["long segments"]]), "sft", "token_mean", tolerance=1e-6)


def test_gradients_add_up_over_calls() -> None:
    forest = Forest.from_sequences(SHAPES["duplicates"])
    backward(MODEL, forest, sft())
    once = take_gradients(MODEL)
    backward(MODEL, forest, sft())
    backward(MODEL, forest, sft())
    assert_gradients_equal({name: grad / 2 for name, grad in take_gradients(MODEL).items()}, once, EXACT)


def forests_of(batch: Batch) -> list[Forest]:
    return [Forest.from_sequences(group) for group in batch.groups]


def low_precision_distance(family: str, seed: int, path: str) -> float:
    """Return the distance of the whole bf16 gradient, tree or flat, from the float32 one."""
    batch = batch_of([SHAPES["long segments"]], seed)
    reference = build(family, seed)
    flat_loss(reference, batch, kind="sft", normalizer="token_mean").backward()  # type: ignore[no-untyped-call]
    expected = take_gradients(reference)
    model = build(family, seed).bfloat16()
    if path == "flat":
        flat_loss(model, batch, kind="sft", normalizer="token_mean").backward()  # type: ignore[no-untyped-call]
    else:
        backward(model, Forest.from_sequences(batch.groups[0]), sft(batch.masks))
    actual = take_gradients(model)
    return global_norm({name: actual[name].float() - expected[name] for name in expected}) / global_norm(expected)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss", "mixtral"])
def test_bfloat16_strays_no_further_than_1_1_times_the_flat_run(family: str) -> None:
    ratios = [
        low_precision_distance(family, seed, "tree") / low_precision_distance(family, seed, "flat") for seed in range(9)
    ]
    assert sorted(ratios)[4] <= 1.1


@pytest.mark.parametrize("way", ["whole", "recomputed", "scored", "reentrant"])
def test_autocast_to_bfloat16_is_close_to_float32_also_after_passes_without_gradients(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = build(), batch_of([SHAPES["long segments"]])
    if way == "reentrant":
        enable_gradient_checkpointing(model, "reentrant")
    objective = gspo(batch.advantages, batch.masks, batch.old_logprobs) if way == "scored" else sft(batch.masks)
    step = functools.partial(backward, model, forests_of(batch), objective)
    options: dict[str, Any] = {"max_tokens": 12} if way in ("recomputed", "scored") else {}
    monkeypatch.setattr("treering.train.memory.free_memory", lambda device: 0.0)
    step(**options)
    expected = take_gradients(model)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            forward(model, GOOD)
        step(**options)
    actual = take_gradients(model)
    assert global_norm({name: actual[name] - expected[name] for name in expected}) <= 0.05 * global_norm(expected)


def test_nothing_to_train_is_a_loss_of_zero_and_no_gradient() -> None:
    result = backward(MODEL, Forest.from_sequences([[1, 2], [3]]), sft([[1, 0], [1]]))
    assert (result.loss, result.metrics["num_trained_tokens"]) == (0.0, 0.0)
    assert backward(MODEL, [], sft([])).plan.micro_batches == ()
    assert all(weight.grad is None for weight in MODEL.parameters())


def test_metrics_average_over_trained_entries_of_all_micro_batches() -> None:
    batch = batch_of([SHAPES["long segments"], SHAPES["comb"][:30]])
    forests = forests_of(batch)
    objective = dapo(batch.advantages, batch.masks, batch.old_logprobs)
    whole = backward(MODEL, forests, objective).metrics
    parts = backward(MODEL, forests, objective, max_tokens=max(forest.num_tokens for forest in forests)).metrics
    MODEL.zero_grad(set_to_none=True)
    assert (whole.pop("num_micro_batches"), parts.pop("num_micro_batches")) == (1, 2)
    assert parts == pytest.approx(whole, rel=1e-10)
    assert whole["num_trained_tokens"] == sum(sum(mask[1:]) for mask in batch.masks)
    assert 0 < whole["clip_high"] + whole["clip_low"] < 1
    assert whole["sharing"] == pytest.approx(1 - sum(f.num_tokens for f in forests) / sum(map(len, batch.sequences)))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forests": [GOOD, Forest.from_sequences([[1, 2, 99]])], "max_tokens": 4}, "token id 99"),
        ({"forests": [GOOD, [1]]}, "expected a Forest, got list"),
        ({"forests": None}, "expected a Forest or several, got None"),
        ({"objective": sft}, "expected an objective, got <function sft"),
        ({"model": build().requires_grad_(False)}, "all are frozen"),
        ({"max_tokens": "8"}, "max_tokens must be an integer of at least 1, or None, got '8'"),
        ({"max_tokens": True}, "max_tokens must be an integer of at least 1"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer of at least 1"),
        ({"temperature": True}, "temperature must be a positive number"),
        ({"value_head": "x"}, "value_head must be a module"),
        ({"value_head": nn.Linear(7, 1)}, "value_head must read hidden states of 32 numbers, got one that reads 7"),
    ],
)
def test_invalid_options_are_refused_before_the_first_gradient(options: dict[str, object], message: str) -> None:
    given = {"model": MODEL, "forests": GOOD, "objective": sft(), "max_tokens": np.int64(2)} | options
    with pytest.raises((ConfigError, InputError, StateError), match=message):
        backward(**given)  # type: ignore[arg-type]
    for off in (torch.no_grad, torch.inference_mode):
        with off(), pytest.raises(StateError, match="they are switched off here"):
            backward(MODEL, GOOD, sft())
    assert all(weight.grad is None for weight in MODEL.parameters())


@pytest.mark.parametrize("name", EXACT_BACKENDS)
def test_the_backend_that_is_asked_for_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The self-check would run the reference too.
    monkeypatch.setenv("TREERING_SELF_CHECK", "0")
    ran: list[str] = []
    for backend in EXACT_BACKENDS:
        honest = getattr(dispatch, {"segments": "segment_attention", "reference": "reference_attention"}[backend])
        spy = functools.partial(
            lambda which, run, *args, **kwargs: ran.append(which) or run(*args, **kwargs), backend, honest
        )
        monkeypatch.setattr(dispatch, honest.__name__, spy)
    backward(MODEL, Forest.from_sequences([[1, 2], [1, 3]]), sft(), backend=name)
    MODEL.zero_grad(set_to_none=True)
    assert set(ran) == {name}


def test_extreme_ratios_leave_gradients_finite() -> None:
    model = build()
    forest = Forest.from_sequences([[1, 2, 3], [1, 2, 4], [1, 5]])
    objective = grpo([1.0, 0.0, 2.0], [[0, 1, 1], [0, 1, 1], [0, 1]], [[0, -200.0, -200.0]] * 2 + [[0, -1e30]])
    result = backward(model, forest, objective)
    assert math.isfinite(result.loss)
    assert all(bool(gradient.isfinite().all()) for gradient in take_gradients(model).values())


@pytest.mark.parametrize(
    ("family", "mode"), [(family, ("reentrant", "non_reentrant")[i % 2]) for i, family in enumerate(FAMILIES)]
)
def test_checkpointed_adapters_of_every_family_are_exact(family: str, mode: str) -> None:
    base = build_float64(family)
    config = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    model = get_peft_model(base, config).double()
    batch = batch_of([SHAPES["long segments"]])
    flat_loss(model, batch, kind="sft", normalizer="token_mean").backward()  # type: ignore[no-untyped-call]
    expected = take_gradients(model)
    enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
    enable({"use_reentrant": mode == "reentrant"})
    backward(model, Forest.from_sequences(batch.groups[0]), sft(batch.masks))
    actual = take_gradients(model)
    assert actual
    assert_gradients_equal(actual, expected, 1e-10)


@pytest.mark.parametrize("max_tokens", [None, 5])
def test_an_optimizer_that_steps_within_backward_is_refused_in_several_micro_batches(max_tokens: int | None) -> None:
    """The second micro-batch would read other weights; with one, each weight steps once, on its whole gradient."""
    batch = [Forest.from_sequences([[i, 2, 3, 4], [i, 2, 5]]) for i in (1, 6)]
    stepping, plain = build_float64(), build_float64()
    for weight in stepping.parameters():
        own = torch.optim.SGD([weight], lr=0.1)
        weight.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    if max_tokens is not None:
        with pytest.raises(StateError, match=r"changed some within backward.*max_tokens=None"):
            backward(stepping, batch, sft(), max_tokens=max_tokens)
        return
    backward(stepping, batch, sft())
    backward(plain, batch, sft())
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for ours, theirs in zip(stepping.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
