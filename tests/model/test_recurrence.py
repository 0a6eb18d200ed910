"""Recurrent layers on forests take states from tree parents under any plan; the patch is undone on exit."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from peft import LoraConfig, get_peft_model

from tests.forests import SHAPES, comb, sequence_sets, star
from tests.hybrids import DENSE, HYBRIDS, PLANNINGS, build_hybrid, build_wide, no_float32, planned
from tests.model.test_context import WAYS, enable_checkpointing, flat_gradients
from tests.model.test_forward import assert_forward_is_exact
from tests.model.test_isolation import assert_isolated
from tests.models import assert_gradients_equal, take_gradients
from treering.attention import TreeLayout
from treering.errors import StateError, UnsupportedError
from treering.model.context import tree_attention
from treering.model.forward import forward
from treering.model.recurrence_calls import calls_of
from treering.tree.forest import Forest

MODELS = {family: build_wide(family) for family in DENSE}
LONG = [[1] * 70 + [2] * 75, [1] * 70 + [3], [1] * 70 + [3, 4] * 40, [1] * 64 + [5] * 3, [1] * 2]
"""Branches longer than the scan's chunks of 64 tokens, with forks on and off a chunk's edge."""


@pytest.fixture(autouse=True, scope="module")
def wide() -> Iterator[None]:
    with no_float32():
        yield


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("planning", PLANNINGS)
@given(sequences=sequence_sets(max_sequences=5))
@settings(max_examples=10)
def test_a_forest_scores_like_its_sequences_whatever_the_plan(
    sequences: list[list[int]], planning: str, family: str
) -> None:
    with planned(planning):
        assert_forward_is_exact(MODELS[family], sequences, 1e-11)


FORESTS = {
    **{name: SHAPES[name][:12] for name in SHAPES if "comb" not in name},
    **{"deep": comb(60)[::6], "wide": star(20, 70, 2), "long": LONG},
}


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("planning", ["fork, padded", "rescan", "mixed"])
@pytest.mark.parametrize("name", FORESTS)
def test_every_shape_scores_like_its_sequences(name: str, planning: str, family: str) -> None:
    with planned(planning):
        assert_forward_is_exact(MODELS[family], FORESTS[name], 1e-11)


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("kernel_size", [2, 3, 7])
def test_contexts_of_every_length_span_as_many_ancestors_as_they_need(kernel_size: int, family: str) -> None:
    name = "mamba_d_conv" if family == "bamba" else "linear_conv_kernel_dim"
    model = build_wide(family, **{name: kernel_size})
    assert_forward_is_exact(model, comb(12), 1e-11)
    with planned("fork"):
        assert_forward_is_exact(model, comb(12), 1e-11)


@pytest.mark.parametrize("family", DENSE)
def test_a_tree_of_single_tokens_is_one_call_per_level_and_exact(family: str) -> None:
    sequences = [[a, 8 + b, 16 + c] for a in range(2) for b in range(3) for c in range(2)]
    layout = TreeLayout(Forest.from_sequences(sequences), torch.device("cpu"))
    with planned("fork"):
        assert [len(level) for level in calls_of(layout).levels] == [1, 1, 1]
        assert_forward_is_exact(MODELS[family], sequences, 1e-11)


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("planning", PLANNINGS)
def test_a_changed_token_changes_no_bit_outside_its_subtree(planning: str, family: str) -> None:
    with planned(planning):
        assert_isolated(build_hybrid(family).eval(), Forest.from_sequences(SHAPES["long segments"] + comb(5)))


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["none", "reentrant", "non_reentrant"])
def test_checkpointing_keeps_gradients_exact_wherever_backward_runs(way: object, mode: str, family: str) -> None:
    model = build_wide(family)
    expected = flat_gradients(model)
    if mode != "none":
        enable_checkpointing(model, mode)
    way(model)  # type: ignore[operator]
    assert_gradients_equal(take_gradients(model), expected, 1e-10)


LORA = {"qwen3_5": ["in_proj_qkv", "in_proj_a", "in_proj_b", "out_proj"], "bamba": ["in_proj", "q_proj"]}


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize(
    ("mode", "planning"), [("none", "rescan"), ("reentrant", "fork, padded"), ("non_reentrant", "rescan")]
)
def test_lora_on_the_recurrent_layers_is_exact(planning: str, mode: str, family: str) -> None:
    base = build_wide(family)
    config = LoraConfig(r=4, target_modules=LORA[family], init_lora_weights=False)
    model = get_peft_model(base, config).double()
    expected = flat_gradients(model)
    assert set(expected) == {name for name, weight in model.named_parameters() if "lora_" in name}
    if mode != "none":
        enable_checkpointing(base, mode)
    with planned(planning):
        WAYS[2](model)
    assert_gradients_equal(take_gradients(model), expected, 1e-10)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("family", ["qwen3_5"])
def test_compiled_layers_are_exact(family: str) -> None:
    model = build_wide(family)
    expected = flat_gradients(model)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    WAYS[0](model)
    # The compiler replaces `Tensor.float`, so norms around the recurrent layer round to float32.
    assert_gradients_equal(take_gradients(model), expected, 1e-6)


@pytest.mark.parametrize("family", DENSE)
def test_a_stock_forward_outside_is_as_before_even_after_an_error(family: str) -> None:
    model = build_wide(family)
    ids = torch.tensor([[1, 2, 3, 4]])
    before = model(input_ids=ids, use_cache=False).logits
    with pytest.raises(KeyError), tree_attention(model):
        raise KeyError
    forward(model, Forest.from_sequences(LONG[:2]))
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)


@pytest.mark.parametrize("family", DENSE)
def test_a_recompute_by_a_foreign_checkpoint_after_the_block_raises(family: str) -> None:
    model = build_wide(family)
    layer = model.model.layers[0]
    honest = layer.forward
    layer.forward = lambda hidden, **kwargs: torch.utils.checkpoint.checkpoint(
        honest, hidden, use_reentrant=False, **kwargs
    )
    with pytest.raises(StateError, match=r"call backward\(\) inside"):
        WAYS[1](model)


def test_a_least_time_step_is_refused_by_name() -> None:
    model = build_hybrid("bamba", time_step_limit=(0.001, 1.0))
    with pytest.raises(UnsupportedError, match=r"BambaMixer has time_step_limit=\(0.001, 1.0\)"):
        forward(model, Forest.from_sequences([[1, 2]]))


def test_a_bounded_time_step_is_exact() -> None:
    assert_forward_is_exact(build_wide("bamba", time_step_limit=(0.0, 0.7)), LONG, 1e-11)
