"""Law 4: a tree trained in partitions gives the gradients of the whole tree within the promised memory."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from benchmarks.common.saved_bytes import peak_saved_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from tests.backends import EXACT_BACKENDS
from tests.forests import SHAPES
from tests.models import FAMILIES, assert_gradients_equal, build, build_float64, take_gradients
from tests.partitions import Parents, chain_partitions, forced, random_partitions
from tests.train.flat import Batch, batches
from tests.train.gradient.test_backward import assert_step_is_exact, batch_of, objective_of
from treering.attention import TreeLayout
from treering.model.context import tree_attention
from treering.model.forward import hidden_states
from treering.model.layers import enable_gradient_checkpointing
from treering.model.tree_model import TreeModel
from treering.objectives import gspo, ppo, sft
from treering.train import memory, scorer, step_plan
from treering.train.memory import free_memory, saved_bytes
from treering.train.step import backward
from treering.tree.forest import Forest
from treering.tree.partition import Partition, PartitionedTree
from treering.tree.plan import Plan

MODEL = build_float64()
EXACT = 1e-10
MODES: list[Parents] = ["keep", "recompute"]
Cut = Callable[[Forest], tuple[Partition, ...]]


@contextmanager
def cut_by(cut: Cut) -> Iterator[None]:
    """Cut every tree of every plan with this function, whatever its size."""

    def plan(forests: list[Forest], max_tokens: int | None, **options: object) -> Plan:
        trees, first = [], 0
        for forest in forests:
            for tree, branches in zip(forest.trees(), forest.branches_by_tree(), strict=True):
                trees.append(PartitionedTree(forest=tree, branches=first + branches, partitions=cut(tree)))
            first += forest.num_branches
        return Plan(micro_batches=(), partitioned=tuple(trees), max_tokens=max_tokens)

    honest = step_plan.plan_batch
    step_plan.plan_batch = plan  # type: ignore[assignment]
    try:
        yield
    finally:
        step_plan.plan_batch = honest


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
@given(batch=batches(), seed=st.integers(0, 10**6), size=st.integers(1, 12), shared=st.sampled_from(["sum", "once"]))
@settings(max_examples=20)
def test_any_partition_gives_the_gradients_of_flat_sequences(
    backend: str, batch: Batch, seed: int, size: int, shared: str
) -> None:
    with cut_by(lambda tree: random_partitions(tree, seed, size)):
        assert_step_is_exact(MODEL, batch, "dapo", "sequence_mean", shared, backend=backend)


@given(batch=batches(), seed=st.integers(0, 10**6), size=st.integers(1, 12))
@settings(max_examples=10)
def test_keeping_and_recomputing_parents_agree_bit_for_bit(batch: Batch, seed: int, size: int) -> None:
    kept, again = (gradients_of(MODEL, batch, lambda tree: random_partitions(tree, seed, size), mode) for mode in MODES)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def gradients_of(model: nn.Module, batch: Batch, cut: Cut, parents: Parents) -> dict[str, Tensor]:
    forests = [Forest.from_sequences(group) for group in batch.groups]
    with cut_by(cut), forced(parents):
        backward(model, forests, objective_of("grpo", batch, "token_mean", "sum"))
    return take_gradients(model)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_exact_in_partitions(shape: str) -> None:
    with cut_by(lambda tree: random_partitions(tree, 0, 40, cut=0.03)):
        assert_step_is_exact(MODEL, batch_of([SHAPES[shape][:30]]), "dapo", "token_mean")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact_in_partitions(family: str) -> None:
    batch = batch_of([SHAPES["long segments"], SHAPES["prefixes of each other"]])
    with cut_by(lambda tree: random_partitions(tree, 1, 20, cut=0.05)):
        assert_step_is_exact(build_float64(family), batch, "grpo", "sequence_mean", temperature=0.8)


@pytest.mark.parametrize(("checkpointing", "parents"), [("reentrant", "keep"), ("non_reentrant", "recompute")])
def test_activation_checkpointing_changes_nothing(checkpointing: str, parents: Parents) -> None:
    model = build_float64()
    batch = batch_of([SHAPES["long segments"]])
    cut = lambda tree: random_partitions(tree, 2, 20, cut=0.05)  # noqa: E731
    expected = gradients_of(model, batch, lambda tree: chain_of_all(tree), "keep")
    enable_gradient_checkpointing(model, checkpointing)
    assert_gradients_equal(gradients_of(model, batch, cut, parents), expected, EXACT)


def chain_of_all(tree: Forest) -> tuple[Partition, ...]:
    return (Partition(tokens=np.arange(tree.num_tokens, dtype=np.int32), parent=-1),)


@pytest.mark.parametrize(
    ("targets", "parents", "checkpointing"),
    [
        (["q_proj"], "keep", "none"),
        (["q_proj", "v_proj", "lm_head"], "recompute", "none"),
        (["q_proj", "v_proj"], "keep", "reentrant"),
    ],
)
def test_lora_is_exact_in_partitions(targets: list[str], parents: Parents, checkpointing: str) -> None:
    base = build_float64(tie_word_embeddings=False)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).double()
    batch = batch_of([SHAPES["long segments"]])
    expected = gradients_of(model, batch, chain_of_all, "keep")
    enable_gradient_checkpointing(model, checkpointing)
    got = gradients_of(model, batch, lambda tree: random_partitions(tree, 3, 20, cut=0.05), parents)
    assert sum(float(gradient.norm()) for gradient in expected.values()) > 0
    assert_gradients_equal(got, expected, EXACT)


def test_only_recomputed_parents_cost_tokens() -> None:
    forest = Forest.from_sequences([[1] * 40])
    recomputed = {}
    for parents in MODES:
        with cut_by(lambda tree: chain_partitions(tree.num_tokens, 12)), forced(parents):
            result = backward(MODEL, forest, sft())
        take_gradients(MODEL)
        recomputed[parents] = result.num_recomputed_tokens
        assert result.metrics["sharing"] == pytest.approx(-recomputed[parents] / 40)
    assert recomputed == {"keep": 0, "recompute": 36}


def test_partitions_above_nothing_that_is_trained_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    honest = scorer.hidden_states

    def counted(parts: object, fragment: Forest, *more: object) -> Tensor:
        lengths.append(fragment.num_tokens)
        return honest(parts, fragment, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(scorer, "hidden_states", counted)
    forest = Forest.from_sequences([[1] * 40])
    with cut_by(lambda tree: chain_partitions(tree.num_tokens, 10)), forced("keep"):
        backward(MODEL, forest, sft([[0] * 12 + [1] + [0] * 27]))
        assert lengths == [10, 10]
        backward(MODEL, forest, sft([[0] * 20 + [1] + [0] * 19]))
        assert lengths == [10, 10, 10, 10], "a partition's first token is scored where its parent is"
        backward(MODEL, forest, sft([[0] * 40]))
        assert len(lengths) == 4
    take_gradients(MODEL)


def long_tree(size: int) -> Forest:
    """Return a tree of ten times `size` tokens with chains of up to four partitions: prompt, middles and leaves."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 32, size).tolist()
    middles = [[*prompt, i, *rng.integers(0, 32, size - 1)] for i in range(3)]
    return Forest.from_sequences([[*middle, j, *rng.integers(0, 32, size - 1)] for middle in middles for j in range(2)])


def long_chain(size: int) -> Forest:
    return Forest.from_sequences([np.random.default_rng(0).integers(0, 32, 10 * size)])


@pytest.mark.parametrize("make", [long_tree, long_chain])
def test_memory_is_that_of_the_longest_chain_or_of_one_partition(make: Callable[[int], Forest]) -> None:
    size, model = 64, build(num_hidden_layers=4)
    forest = make(size)
    assert forest.num_tokens == 10 * size

    def peak(run: Callable[[], object]) -> int:
        return peak_saved_bytes(run, model.parameters())

    one = peak(lambda: backward(model, Forest.from_sequences([[1] * size]), sft()))
    chain = max(tree.chain_tokens for tree in backward(model, forest, sft(), max_tokens=size).plan.partitioned)
    with forced("keep"):
        kept = peak(lambda: backward(model, forest, sft(), max_tokens=size))
    with forced("recompute"):
        again = peak(lambda: backward(model, forest, sft(), max_tokens=size))
    config = model.config
    key_value_bytes = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert kept <= 1.25 * one * chain / size
    assert again <= 1.25 * (one + chain * key_value_bytes)
    assert kept > 2 * again, "a bound that both meet would show nothing"


def test_steps_leave_nothing_behind() -> None:
    """A probe that kept its own graph once cost 64 tokens of activations per step."""
    model, forest = build(), Forest.from_sequences([[1] * 30, [1] * 20 + [2] * 10])
    gc.collect()
    before = num_layouts()
    for _ in range(2):
        assert backward(model, forest, sft(), max_tokens=7).parents is not None
    gc.collect()
    assert num_layouts() == before


def num_layouts() -> int:
    return sum(type(thing) is TreeLayout for thing in gc.get_objects())


def test_the_memory_model_chooses_by_what_a_token_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, forest = build(), Forest.from_sequences([[1] * 400])
    token_bytes = saved_bytes(lambda: hidden_of(model, 200), TreeModel.of(model)) / 200
    chosen = {}
    for share in (1.2, 0.8):
        room = share * 400 * token_bytes
        monkeypatch.setattr(memory, "free_memory", lambda device, room=room: room)
        result = backward(model, forest, sft(), max_tokens=100)
        assert result.parents is not None
        assert "400 tokens, about 0.0" in result.parents.reason
        chosen[share] = result.parents.keeps
    assert chosen == {1.2: True, 0.8: False}
    assert backward(model, forest, sft()).parents is None
    assert free_memory(torch.device("cpu")) > 0


def hidden_of(model: nn.Module, num_tokens: int) -> object:
    with tree_attention(model):
        return hidden_states(TreeModel.of(model), Forest.from_sequences([[1] * num_tokens]))


def test_the_head_or_the_value_head_may_be_all_that_trains() -> None:
    forest = Forest.from_sequences([[1, 2, 3, 4], [1, 2, 5, 6]])
    only_head = build_float64(tie_word_embeddings=False)
    for name, weight in only_head.named_parameters():
        weight.requires_grad_("lm_head" in name)
    backward(only_head, forest, sft(normalizer="sum"))
    expected = take_gradients(only_head)
    backward(only_head, forest, sft(normalizer="sum"), 3)
    assert_gradients_equal(take_gradients(only_head), expected, EXACT)
    frozen, head = build_float64().requires_grad_(False), nn.Linear(32, 1).double()
    objective = ppo([1.0, 2.0], [[0, 1, 1, 1]] * 2, returns=[1.0, 2.0])
    backward(frozen, forest, objective, value_head=head)
    expected = take_gradients(head)
    backward(frozen, forest, objective, 3, value_head=head)
    assert_gradients_equal(take_gradients(head), expected, EXACT)
    assert expected["weight"].any()


def test_a_device_that_prefers_fewer_tokens_cuts_where_that_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    forest = Forest.from_sequences([[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8, 9]])
    masks = [[0, 1, 1, 1, 1, 1]] * 2
    by_sequence = gspo([1.0, -1.0], masks, [[-3.0] * 6] * 2)
    backward(MODEL, forest, sft(masks))
    expected = take_gradients(MODEL)
    monkeypatch.setattr(step_plan, "FILL_TOKENS", {"cpu": 4})
    few = backward(MODEL, forest, sft(masks), 16)
    assert_gradients_equal(take_gradients(MODEL), expected, EXACT)
    assert (few.plan.max_tokens, few.plan.num_micro_batches, few.num_recomputed_tokens) == (4, 3, 0)
    # The limit stays if a pass without gradients would be needed or ranks must plan alike; None runs everything at
    # once.
    for objective, max_tokens, in_step in ((by_sequence, 16, False), (sft(masks), 16, True), (sft(masks), None, False)):
        plan = step_plan.plan_step([forest], objective, max_tokens, device=torch.device("cpu"), in_step=in_step)
        assert (plan.max_tokens, plan.num_micro_batches) == (max_tokens, 1)
    take_gradients(MODEL)
