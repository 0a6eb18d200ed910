"""A bound model is never stale: changing its parts binds it again, and nothing else does."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests import image_models, models
from tests.hybrids import HYBRIDS, build_hybrid
from tests.models import VOCAB, build, take_gradients
from treering.errors import ConfigError, InputError, UnsupportedError
from treering.families import FAMILIES, IMAGE_FAMILIES, Family, register_family
from treering.model.checks import check_positions, max_positions
from treering.model.forward import forward
from treering.model.patch import patch
from treering.model.tree_model import TreeModel
from treering.objectives import sft
from treering.train.step import backward
from treering.tree.forest import Forest

FOREST = Forest.from_sequences([[5, 6, 7, 8], [5, 6, 9]])


def replace_head(model: nn.Module) -> None:
    model.lm_head = nn.Linear(32, VOCAB, bias=False)  # type: ignore[assignment]


def replace_layer(model: nn.Module) -> None:
    model.model.layers[1] = build(seed=7).model.layers[1]  # type: ignore[union-attr, operator]


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "adapters": lambda model: get_peft_model(model, LoraConfig(target_modules=["q_proj"])),  # type: ignore[arg-type]
    "head": replace_head,
    "layer": replace_layer,
    "vocabulary": lambda model: model.resize_token_embeddings(VOCAB - 4),  # type: ignore[operator]
    "class": lambda model: setattr(model, "__class__", type("Sharded", (type(model),), {})),
    "setting": lambda model: setattr(model.config, "final_logit_softcapping", 2.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_is_bound_again(change: str) -> None:
    model = build()
    bound = TreeModel.of(model)
    assert TreeModel.of(model) is bound is TreeModel.of(bound) is TreeModel.of(model, calls_modules=True)
    assert bound.model is model
    CHANGES[change](model)
    again = TreeModel.of(bound)
    assert again is not bound
    assert TreeModel.of(model) is again


def test_a_bound_model_follows_an_adapter_a_head_and_a_refused_setting() -> None:
    model = build()
    bound = TreeModel.of(model)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    replace_head(model)
    torch.testing.assert_close(forward(bound, FOREST).logprobs, forward(model, FOREST).logprobs, rtol=0, atol=0)
    model.config.router_jitter_noise = 0.1
    with pytest.raises(UnsupportedError, match="router_jitter_noise"):
        backward(bound, FOREST, sft())


def test_backward_and_patch_of_a_bound_model_are_those_of_the_model() -> None:
    model = build()
    backward(model, FOREST, sft())
    expected = take_gradients(model)
    backward(TreeModel.of(model), FOREST, sft())
    for name, gradient in take_gradients(model).items():
        assert torch.equal(gradient, expected[name])
    patched = patch(TreeModel.of(model))
    assert model(input_ids=torch.tensor([[5, 6, 7], [5, 6, 8]])).logits.shape == (2, 3, VOCAB)
    assert patched.take_counts().num_tokens == 4
    patched.undo()


def test_binding_keeps_no_model_alive() -> None:
    model = build()
    TreeModel.of(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_a_family_of_your_own_trains_once_it_is_registered() -> None:
    class OwnConfig(LlamaConfig):
        model_type = "own_llama"

    class OwnForCausalLM(LlamaForCausalLM):
        config_class = OwnConfig

    AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    model = OwnForCausalLM(OwnConfig(vocab_size=VOCAB, **shape))
    with pytest.raises(UnsupportedError, match="model type 'own_llama' is not supported; supported are llama, "):
        forward(model, FOREST)
    register_family(Family(model_type="own_llama", liger_activation="silu"))
    register_family(Family(model_type="own_llama", liger_activation="silu"))
    assert forward(model, FOREST).logprobs[1] < 0
    with pytest.raises(ConfigError, match="'own_llama' is registered as Family"):
        register_family(Family(model_type="own_llama"))
    del FAMILIES["own_llama"]


def test_the_limit_of_positions_is_that_of_the_configuration_inside_any_wrapper() -> None:
    model = build(max_position_embeddings=32)
    assert max_positions(model) == max_positions(torch.compile(model, backend="eager")) == 32  # type: ignore[arg-type]
    for missing in (None, 0):
        vars(model.config)["max_position_embeddings"] = missing
        assert max_positions(model) is None
    assert max_positions(torch.nn.Linear(2, 2)) is None


def test_the_last_position_is_allowed_and_the_next_one_is_not() -> None:
    check_positions(32, 32, what="this", fix="cut it")
    check_positions(10**9, None, what="this", fix="cut it")
    with pytest.raises(InputError, match="the model has 32 positions, and this goes beyond; cut it"):
        check_positions(33, 32, what="this", fix="cut it")


def test_every_registered_family_has_a_model_that_the_laws_are_tested_on() -> None:
    text = {build(family).config.model_type for family in models.FAMILIES}
    text |= {build_hybrid(family).config.model_type for family in HYBRIDS}
    images = [image_models.build(family).config for family in image_models.FAMILIES]
    text |= {config.get_text_config().model_type for config in images}
    assert set(FAMILIES) <= text
    assert {config.model_type for config in images} == set(IMAGE_FAMILIES)
