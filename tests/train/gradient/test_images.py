"""Law 2 with images: gradients of text, projector and vision tower equal those of flat stock transformers."""

import numpy as np
import pytest
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.image_models import (
    FAMILIES,
    IMAGE,
    VIDEO,
    Sequenced,
    build,
    flat_loss,
    forest_of,
    image,
    sequence,
    sequences_of,
)
from tests.models import build as build_text
from tests.models import take_gradients
from treering.errors import InputError
from treering.model.forward import forward
from treering.objectives import sft
from treering.train.step import BackwardResult, backward
from treering.tree.image_tokens import image_spans


def count_calls(model: nn.Module) -> list[int]:
    """Return a list whose entry counts the vision tower's calls from now on."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    calls = [0]

    def count(*_: object) -> None:
        calls[0] += 1

    vision_tower = getattr(inner.model, "visual", None) or inner.model.vision_tower
    vision_tower.register_forward_pre_hook(count)
    return calls


def assert_equal(model: nn.Module, sequences: list[Sequenced], **options: object) -> BackwardResult:
    """Check that loss and gradients equal those of flat training within 1e-6 of the largest gradient."""
    expected_loss = flat_loss(model, sequences)
    expected_loss.backward()
    expected = take_gradients(model)
    masks = [one.mask for one in sequences]
    num_calls = count_calls(model)
    result = backward(model, forest_of(sequences), sft(masks, normalizer="sum"), **options)
    assert num_calls == [1], "each distinct image goes through the vision tower once a step"
    actual = take_gradients(model)
    assert result.loss == pytest.approx(expected_loss.item(), rel=1e-6)
    largest = max(float(grad.abs().max()) for grad in expected.values())
    errors = {name: float((actual[name] - grad).abs().max()) / largest for name, grad in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= 1e-6, f"{worst}: {errors[worst]:.1e} of the largest gradient"
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_of_flat_sequences(family: str) -> None:
    assert_equal(build(family), sequences_of(family))


def test_only_the_loss_of_text_is_trained() -> None:
    sequences = sequences_of("qwen2_5_vl")
    masks = [[True] * len(one.tokens) for one in sequences]
    with pytest.raises(InputError, match="never trained to write images"):
        backward(build("qwen2_5_vl"), forest_of(sequences), sft(masks))
    forest = forest_of(sequences)
    out = forward(build("qwen2_5_vl"), forest)
    assert (out.logprobs[forest.tokens < 0] == 0).all()


@pytest.mark.parametrize(
    ("family", "one", "reason"),
    [
        ("qwen2_5_vl", sequence(5, IMAGE, trained=[6]), "without an image"),
        ("qwen3_vl", sequence(5, VIDEO, trained=[6]), "no video or sound"),
        ("qwen2_5_vl", sequence(5, image("gemma3", 0), trained=[6]), "processor of this model"),
        ("gemma3", sequence(5, image("qwen3_vl", 0), trained=[6]), "processor of this model"),
        ("gemma3", sequence(5, image("gemma3", 0), image("gemma3", 1), trained=[6]), "see them as one"),
    ],
)
def test_what_a_model_would_get_wrong_is_refused(family: str, one: Sequenced, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        backward(build(family), forest_of([one]), sft([one.mask]))


def test_a_model_of_text_refuses_images() -> None:
    one = sequence(5, image("gemma3", 0), trained=[6])
    with pytest.raises(InputError, match="takes text only"):
        backward(build_text(), forest_of([one]), sft([one.mask]))


@pytest.mark.parametrize("max_tokens", [9, 17, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_partitions_cut_between_and_next_to_images(family: str, max_tokens: int) -> None:
    sequences = sequences_of(family)
    forest = forest_of(sequences)
    largest = max(one.num_tokens for one in forest.images)
    if max_tokens < largest:
        with pytest.raises(InputError, match="never cut"):
            backward(build(family), forest, sft([one.mask for one in sequences]), max_tokens)
        return
    result = assert_equal(build(family), sequences, max_tokens=max_tokens)
    assert sum(len(tree.partitions) for tree in result.plan.partitioned) > 1
    spans = image_spans(result.plan.partitioned[0].forest)
    for tree in result.plan.partitioned:
        for part in tree.partitions:
            inside = [np.isin(np.arange(*span), part.tokens) for span in spans]
            assert all(each.all() or not each.any() for each in inside)


@pytest.mark.parametrize(("family", "backend"), [("gemma3", "reference"), ("qwen3_vl", "triton")])
def test_other_backends_see_images_alike(family: str, backend: str) -> None:
    assert_equal(build(family), sequences_of(family), backend=backend, max_tokens=40)


FROZEN = {
    "vision tower": ("visual.blocks", "visual.patch_embed", "vision_tower"),
    "all of vision": ("visual", "vision_tower", "multi_modal_projector"),
    "text": ("language_model", "lm_head"),
}


@pytest.mark.parametrize("frozen", list(FROZEN))
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_frozen_parts_leave_the_gradients_of_the_others(family: str, frozen: str) -> None:
    model = build(family)
    for name, weight in model.named_parameters():
        weight.requires_grad = not any(part in name for part in FROZEN[frozen])
    assert_equal(model, sequences_of(family))


@pytest.mark.parametrize(("family", "mode"), [("qwen2_5_vl", "reentrant"), ("gemma3", "not reentrant")])
def test_adapters_and_checkpointing_are_exact(family: str, mode: str) -> None:
    model = build(family)
    config = LoraConfig(r=4, target_modules=r".*(q_proj|v_proj|qkv|down_proj|fc1)", init_lora_weights=False)
    # In float32, the flat gradients of random adapters are 1.0e-6 from the float64 ones, and the tree's 0.8e-6.
    model = get_peft_model(model, config).double()
    model.enable_input_require_grads()
    base = model.get_base_model()
    enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
    enable({"use_reentrant": mode == "reentrant"})
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert any("visi" in name or "visual" in name for name in names)
    assert_equal(model, sequences_of(family), max_tokens=40)
