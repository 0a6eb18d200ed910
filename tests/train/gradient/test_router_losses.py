"""Law 2 with router losses: balance and z loss of a forest equal those of its flat batch in one stock forward."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from tests.forests import SHAPES
from tests.models import assert_gradients_equal, build, build_float64, take_gradients
from tests.partitions import Parents, forced, random_partitions
from tests.train.flat import Batch, batches, flat_loss
from tests.train.gradient.flat_routers import flat_router_loss, flat_router_terms, padded, routers_of
from tests.train.gradient.test_backward import batch_of, forests_of
from tests.train.gradient.test_partitioned import MODES, cut_by
from tests.train.objectives.cases import CASES
from tests.train.objectives.flat_objectives import data_of, run_flat
from treering.config.steps import RouterLosses
from treering.errors import ConfigError, InputError, StateError, UnsupportedError
from treering.model.layers import enable_gradient_checkpointing
from treering.model.routers import find_routers
from treering.model.tree_model import TreeModel
from treering.objectives import sft
from treering.train.router_losses import branches_through
from treering.train.step import BackwardResult, backward
from treering.train.step_plan import plan_step
from treering.tree.forest import Forest

EXACT = 1e-10
MIXTURES = ["mixtral", "qwen3_moe", "gpt_oss"]
# Far larger than usual, so that an error in them dominates the whole gradient.
LOSSES = RouterLosses(balance=0.7, z=0.2)
MODEL = build_float64("mixtral")
HEAD = nn.Linear(32, 1).double()
BATCH = batch_of([SHAPES["bushy"][:6], SHAPES["prefixes of each other"], SHAPES["duplicates"], [[3]], [[1, 2], [1, 4]]])
LARGEST = max(tree.num_tokens for group in BATCH.groups for tree in Forest.from_sequences(group).trees())
BUDGETS = [None, LARGEST, 12]
"""One forward, several micro-batches, partitions."""


@pytest.fixture(autouse=True)
def clean_gradients() -> Iterator[None]:
    yield
    MODEL.zero_grad(set_to_none=True)


def assert_routed_step_is_exact(
    model: nn.Module,
    batch: Batch,
    losses: RouterLosses = LOSSES,
    *,
    max_tokens: int | None = None,
    parents: Parents = "keep",
    within: AbstractContextManager[None] | None = None,
    **options: Any,
) -> BackwardResult:
    """Check loss, metrics and every parameter's gradient."""
    balance, z = flat_router_terms(model, batch.sequences)
    expected = (
        flat_loss(model, batch, kind="sft", normalizer="token_mean")
        + (losses.balance or 0.0) * balance
        + (losses.z or 0.0) * z
    )
    expected.backward()  # type: ignore[no-untyped-call]
    expected_gradients = take_gradients(model)
    with within or nullcontext(), forced(parents):
        result = backward(model, forests_of(batch), sft(batch.masks), max_tokens, router_losses=losses, **options)
    assert result.loss == pytest.approx(expected.item(), rel=EXACT)
    assert result.metrics["router_balance"] == pytest.approx(balance.item(), rel=EXACT)
    assert result.metrics["router_z"] == pytest.approx(z.item(), rel=EXACT)
    assert_gradients_equal(take_gradients(model), expected_gradients, EXACT)
    return result


def untrained(batch: Batch, branches: set[int]) -> Batch:
    masks = [[0] * len(mask) if i in branches else mask for i, mask in enumerate(batch.masks)]
    return Batch(groups=batch.groups, masks=masks, advantages=batch.advantages, old_logprobs=batch.old_logprobs)


@pytest.mark.parametrize("experts_per_token", [1, 2])
@pytest.mark.parametrize("family", MIXTURES)
def test_in_one_forward_they_are_those_of_the_flat_batch(family: str, experts_per_token: int) -> None:
    model = build_float64(family, num_experts_per_tok=experts_per_token)
    result = assert_routed_step_is_exact(model, BATCH)
    assert result.plan.num_micro_batches == 1
    assert result.num_scoring_tokens == 0


@pytest.mark.parametrize("family", MIXTURES)
def test_a_stock_model_s_own_loss_is_met_to_rounding(family: str) -> None:
    model: Any = build(family)
    sequences = SHAPES["long segments"]
    ids, mask = padded(sequences)
    model.router_aux_loss_coef = 0.5
    labels = ids.masked_fill(mask == 0, -100)
    output = model(input_ids=ids, attention_mask=mask, labels=labels, output_router_logits=True)
    output.loss.backward()
    expected = take_gradients(model)
    result = backward(model, Forest.from_sequences(sequences), sft(), router_losses=RouterLosses(balance=0.5))
    assert result.averages["router_balance"] == pytest.approx(output.aux_loss.item(), rel=1e-6)
    assert_gradients_equal(take_gradients(model), expected, 1e-5)


@pytest.mark.parametrize(("family", "parents"), list(zip(MIXTURES, [*MODES, "keep"], strict=True)))
def test_micro_batches_and_partitions_change_nothing(family: str, parents: Parents) -> None:
    model = build_float64(family)
    result = assert_routed_step_is_exact(model, BATCH, max_tokens=LARGEST)
    assert len(result.plan.micro_batches) > 1
    assert not result.plan.partitioned
    assert result.num_scoring_tokens == result.plan.num_tokens
    cut = cut_by(lambda tree: random_partitions(tree, 1, 20, cut=0.05))
    assert_routed_step_is_exact(model, BATCH, parents=parents, within=cut)


@given(batch=batches(max_groups=3), seed=st.integers(0, 10**6), size=st.integers(1, 12), parents=st.sampled_from(MODES))
@settings(max_examples=12)
def test_any_partition_of_any_forest_is_exact(batch: Batch, seed: int, size: int, parents: Parents) -> None:
    cut = cut_by(lambda tree: random_partitions(tree, seed, size))
    assert_routed_step_is_exact(MODEL, batch, parents=parents, within=cut)


@given(
    batch=batches(max_groups=3),
    max_tokens=st.integers(1, 30),
    losses=st.builds(RouterLosses, balance=st.sampled_from([0.0, 0.5]), z=st.sampled_from([0.0, 0.3])),
)
@settings(max_examples=12)
def test_any_budget_and_coefficients_are_exact(batch: Batch, max_tokens: int, losses: RouterLosses) -> None:
    assert_routed_step_is_exact(MODEL, batch, losses, max_tokens=max_tokens)


@pytest.mark.parametrize("max_tokens", BUDGETS)
@pytest.mark.parametrize("branches", [{0, 2, 6, 7, 8, 9, 13}, set(range(len(BATCH.masks)))], ids=["some", "all"])
def test_branches_without_a_trained_token_count(branches: set[int], max_tokens: int | None) -> None:
    assert_routed_step_is_exact(MODEL, untrained(BATCH, branches), max_tokens=max_tokens)


def test_layers_without_experts_have_no_say() -> None:
    model = build_float64("qwen3_moe", mlp_only_layers=[0], num_hidden_layers=3)
    assert len(find_routers(TreeModel.of(model)).modules) == 2
    assert_routed_step_is_exact(model, BATCH, max_tokens=30)


@pytest.mark.parametrize(
    ("name", "max_tokens"), [("gspo as in its paper", None), ("gspo as in its paper", 12), ("dpo", LARGEST)]
)
def test_objectives_that_see_whole_branches_or_pairs_stay_exact(name: str, max_tokens: int | None) -> None:
    data = data_of([SHAPES["bushy"][:6], SHAPES["duplicates"], [[3]]], MODEL, seed=7)
    expected = CASES[name].loss(data, run_flat(MODEL, data, value_head=HEAD))
    expected = expected + flat_router_loss(MODEL, data.sequences, LOSSES)
    expected.backward()  # type: ignore[no-untyped-call]
    gradients = take_gradients(MODEL)
    forests = [Forest.from_sequences(group) for group in data.groups]
    result = backward(MODEL, forests, CASES[name].make(data), max_tokens, router_losses=LOSSES)
    assert result.loss == pytest.approx(expected.item(), rel=EXACT)
    assert_gradients_equal(take_gradients(MODEL), gradients, EXACT)
    # One pass without gradients computes both the vectors and the router load.
    assert result.num_scoring_tokens == (0 if max_tokens is None else result.plan.num_tokens)


def test_checkpointing_without_reentry_changes_nothing() -> None:
    model = build_float64("mixtral")
    enable_gradient_checkpointing(model, "non_reentrant")
    cut = cut_by(lambda tree: random_partitions(tree, 1, 20, cut=0.05))
    assert_routed_step_is_exact(model, BATCH, parents="recompute", within=cut)


def test_reentrant_checkpointing_is_refused_before_a_gradient_is_added() -> None:
    model = build_float64("mixtral")
    enable_gradient_checkpointing(model, "reentrant")
    with pytest.raises(UnsupportedError, match="non_reentrant"):
        backward(model, forests_of(BATCH), sft(BATCH.masks), 12, router_losses=LOSSES)
    assert all(weight.grad is None for weight in model.parameters())


def test_lora_is_exact() -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["gate"], init_lora_weights=False)
    model = get_peft_model(build_float64("mixtral"), lora).double()
    assert_routed_step_is_exact(model, BATCH, max_tokens=30)


def test_the_largest_load_is_that_of_one_expert_in_one_layer() -> None:
    logits: list[Tensor] = []
    handles = [r.register_forward_hook(lambda _m, _i, out: logits.append(out[0])) for r in routers_of(MODEL)]
    counts = np.zeros((2, 4))
    for sequence in BATCH.sequences:
        logits.clear()
        MODEL(input_ids=torch.tensor([sequence]), use_cache=False)
        for layer, rows in enumerate(logits):
            for row in rows.tolist():
                for expert in sorted(range(4), key=lambda e: -row[e])[:2]:
                    counts[layer, expert] += 1
    for handle in handles:
        handle.remove()
    result = backward(MODEL, forests_of(BATCH), sft(BATCH.masks), 12, router_losses=LOSSES)
    assert result.metrics["expert_load_max"] == pytest.approx(counts.max() / counts.mean(), rel=1e-12)


def test_a_balance_loss_takes_one_forward_where_the_budget_has_room() -> None:
    forests = [Forest.from_sequences([[i] + [1] * 500]) for i in range(8)]
    cpu = torch.device("cpu")
    apart = plan_step(forests, sft(), 10_000, device=cpu)
    together = plan_step(forests, sft(), 10_000, device=cpu, router_losses=LOSSES)
    assert (len(apart.micro_batches), len(together.micro_batches)) == (2, 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_branches_through_a_token_are_the_paths_that_hold_it(shape: str) -> None:
    forest = Forest.from_sequences(SHAPES[shape])
    expected = np.zeros(forest.num_tokens, np.int64)
    for branch in range(forest.num_branches):
        expected[forest.path(branch)] += 1
    assert branches_through(forest).tolist() == expected.tolist()


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_trained_is_refused_by_name() -> None:
    for name, value in (("balance", -0.1), ("z", float("nan")), ("z", "0.1"), ("balance", True)):
        with pytest.raises(ConfigError, match=name):
            RouterLosses(**{name: value})  # type: ignore[arg-type]
    forest = Forest.from_sequences([[1, 2]])
    with pytest.raises(UnsupportedError, match="'qwen3' has no routers"):
        backward(build(), forest, sft(), router_losses=LOSSES)
    with pytest.raises(InputError, match="RouterLosses"):
        backward(MODEL, forest, sft(), router_losses=0.001)  # type: ignore[arg-type]


def test_routers_that_do_not_run_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp: Any = MODEL.model.layers[1].mlp
    monkeypatch.setattr(mlp, "forward", lambda hidden: hidden)
    with pytest.raises(StateError, match=r"each of the 2 routers must run once per forward, and 1 did"):
        backward(MODEL, Forest.from_sequences([[1, 2]]), sft(), router_losses=LOSSES)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_models_with_recurrent_layers_and_experts_are_exact(family: str) -> None:
    from tests import hybrids

    model = hybrids.build_wide(family)
    batch = batch_of([SHAPES["bushy"][:4], SHAPES["duplicates"], [[3]]])
    with hybrids.no_float32():
        assert_routed_step_is_exact(model, batch)
        cut = cut_by(lambda tree: random_partitions(tree, 1, 20, cut=0.05))
        assert_routed_step_is_exact(model, batch, within=cut)
