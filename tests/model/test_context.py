"""The patch is exact while it is on, gone when it is off, and refuses what it cannot make exact."""

import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from peft import (
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PolyConfig,
    PrefixTuningConfig,
    get_peft_model,
)
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from tests import image_models
from tests.forests import SHAPES
from tests.models import assert_gradients_equal, build, build_float64, flat_logprobs, take_gradients
from treering.errors import ConfigError, StateError, UnsupportedError
from treering.model import tree_model
from treering.model.context import tree_attention
from treering.model.forward import forward
from treering.model.patch import patch
from treering.tree.forest import Forest

SEQUENCES = SHAPES["long segments"]
FOREST = Forest.from_sequences(SEQUENCES)


def flat_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    for sequence in SEQUENCES:
        flat_logprobs(model, sequence)[0].sum().backward()
    return take_gradients(model)


def sum_over_branches(logprobs: torch.Tensor) -> torch.Tensor:
    return sum(
        (logprobs[torch.from_numpy(FOREST.path(i)).long()].sum() for i in range(len(SEQUENCES))), torch.zeros(())
    )


def enable_checkpointing(model: PreTrainedModel, mode: str) -> None:
    name = (
        "activation_checkpointing_enable"
        if hasattr(model, "activation_checkpointing_enable")
        else "gradient_checkpointing_enable"
    )
    getattr(model, name)({"use_reentrant": mode == "reentrant"})


def backward_inside(model: nn.Module) -> None:
    with tree_attention(model):
        sum_over_branches(forward(model, FOREST).logprobs).backward()


def backward_after_the_block(model: nn.Module) -> None:
    with tree_attention(model):
        loss = sum_over_branches(forward(model, FOREST).logprobs)
    loss.backward()


def backward_without_a_block(model: nn.Module) -> None:
    sum_over_branches(forward(model, FOREST).logprobs).backward()


WAYS = [backward_inside, backward_after_the_block, backward_without_a_block]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["none", "reentrant", "non_reentrant"])
def test_checkpointing_keeps_gradients_exact_wherever_backward_runs(
    way: Callable[[nn.Module], None], mode: str
) -> None:
    model = build_float64()
    expected = flat_gradients(model)
    if mode != "none":
        enable_checkpointing(model, mode)
    way(model)
    assert_gradients_equal(take_gradients(model), expected, 1e-10)


def test_a_head_that_peft_trains_in_full_is_exact() -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    model = get_peft_model(build_float64(), config).double()
    expected = flat_gradients(model)
    assert any("modules_to_save" in name for name in expected)
    backward_without_a_block(model)
    assert_gradients_equal(take_gradients(model), expected, 1e-10)


def test_a_recompute_by_a_foreign_checkpoint_after_the_block_raises() -> None:
    model = build()

    class Checkpointed(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer
            # transformers 5.0 reads the attribute from each layer.
            self.attention_type = getattr(layer, "attention_type", None)

        def forward(self, hidden: torch.Tensor, **kwargs: object) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.layer, hidden, use_reentrant=False, **kwargs)  # type: ignore[no-any-return]

    model.model.layers = nn.ModuleList(Checkpointed(layer) for layer in model.model.layers)
    backward_inside(model)
    assert float(torch.stack([g.norm() for g in take_gradients(model).values()]).sum()) > 0
    with pytest.raises(StateError, match=r"call backward\(\) inside"):
        backward_after_the_block(model)


def test_the_model_is_as_before_on_exit_even_after_an_error() -> None:
    model = build()
    enable_checkpointing(model, "reentrant")
    ids = torch.tensor([[1, 2, 3]])
    before = model(input_ids=ids).logits
    functions = [layer._gradient_checkpointing_func for layer in model.model.layers]
    hooks = sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())

    def fail_inside() -> None:
        with tree_attention(model) as active:
            assert active.backend == "segments"
            assert model.config._attn_implementation == "treering_segments"
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert model.config._attn_implementation == "sdpa"
    assert [layer._gradient_checkpointing_func for layer in model.model.layers] == functions
    assert sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()) == hooks
    assert torch.equal(model(input_ids=ids).logits, before)


def test_a_plain_call_inside_the_block_is_refused() -> None:
    model = build()
    with tree_attention(model), pytest.raises(StateError, match=r"call treering\.forward instead"):
        model(input_ids=torch.tensor([[1, 2]]))


def test_a_block_inside_a_block_is_refused_and_leaves_the_outer_one_whole() -> None:
    model = build_float64()
    with tree_attention(model):
        with pytest.raises(StateError, match="already inside tree_attention"), tree_attention(model, "reference"):
            pass
        assert forward(model, FOREST).logprobs.shape == (FOREST.num_tokens,)


def test_an_outer_block_chooses_the_backend() -> None:
    model = build_float64()
    with tree_attention(model, backend="reference") as active:
        assert (active.backend, active.reason) == ("reference", "as requested")
        outer = forward(model, FOREST).logprobs
    torch.testing.assert_close(outer, forward(model, FOREST).logprobs, atol=1e-12, rtol=1e-12)
    with pytest.raises(ConfigError, match="unknown attention backend 'cudnn'"), tree_attention(model, backend="cudnn"):
        pass


def test_a_block_of_another_thread_is_refused_and_left_whole() -> None:
    model = build_float64()
    implementation = model.config._attn_implementation
    expected = forward(model, FOREST).logprobs
    raised: list[BaseException] = []

    def intrude() -> None:
        for use in (lambda: forward(model, FOREST), lambda: tree_attention(model).__enter__()):
            try:
                use()
            except StateError as error:
                raised.append(error)

    with tree_attention(model):
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        torch.testing.assert_close(forward(model, FOREST).logprobs, expected)
    assert ["in another thread" in str(raised[0]), "already" in str(raised[1])] == [True, True]
    assert model.config._attn_implementation == implementation
    torch.testing.assert_close(forward(model, FOREST).logprobs, expected)


def test_models_that_share_a_configuration_object_do_not_run_each_others_attention() -> None:
    policy = build_float64()
    reference = type(policy)(policy.config).double()
    ids = torch.tensor([[1, 2, 3]])
    before = reference(input_ids=ids).logits
    with tree_attention(policy):
        assert forward(reference, FOREST).logprobs.shape == (FOREST.num_tokens,)
        with pytest.raises(StateError, match=r"shares its configuration object.*copy\.deepcopy"):
            reference(input_ids=ids)
    assert torch.equal(reference(input_ids=ids).logits, before)


def test_hosts_that_want_tuples_change_nothing() -> None:
    model = build_float64()
    expected = forward(model, FOREST).logprobs
    model.config.return_dict = False
    assert torch.equal(forward(model, FOREST).logprobs, expected)


def retyped(model_type: str, model: nn.Module) -> nn.Module:
    model.config.model_type = model_type
    return model


def dynamic_in_one_type() -> nn.Module:
    model = build("gemma3")
    model.config.rope_parameters["full_attention"]["rope_type"] = "dynamic"
    return model


def other_head() -> nn.Module:
    model = build()
    model.lm_head = nn.Sequential(model.lm_head, nn.Tanh())
    return model


def own_forward() -> nn.Module:
    class Capped(LlamaForCausalLM):
        def forward(self, *args: object, **kwargs: object) -> object:
            return super().forward(*args, **kwargs)

    return Capped(build("llama").config)


def of_its_own_kind() -> nn.Module:
    class Config(PreTrainedConfig):
        model_type = "llama"

    class Model(LlamaForCausalLM):
        config_class = Config

    model = build("llama")
    model.__class__ = Model
    model.config = Config(**{name: getattr(model.config, name) for name in ("rope_parameters", "hidden_act")})
    return model


def hooked() -> nn.Module:
    model = build()
    model.register_forward_hook(lambda module, args, output: None)
    return model


def longrope() -> nn.Module:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    return build("llama", rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, **factors})


def with_dropout() -> nn.Module:
    return get_peft_model(build(), LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1))


Q = ["q_proj"]


def adapted(config: PeftConfig) -> Callable[[], nn.Module]:
    return lambda: get_peft_model(build(), config).train()


def neftune_post_forward_hook(module: nn.Module, args: tuple[object, ...], output: torch.Tensor) -> torch.Tensor:
    """Stand-in for a hook that transformers releases define under this name in various modules."""
    return output + torch.rand_like(output)


def with_noisy_embedding() -> nn.Module:
    model = build()
    model.get_input_embeddings().register_forward_hook(neftune_post_forward_hook)
    return model


def with_batch_norm() -> nn.Module:
    model = build().train()
    mlp = model.model.layers[0].mlp
    mlp.norm = nn.BatchNorm1d(mlp.down_proj.out_features)
    mlp.register_forward_hook(lambda _module, _args, output: mlp.norm(output.transpose(1, 2)).transpose(1, 2))
    return model


def prefix_tuned() -> nn.Module:
    return get_peft_model(build("llama"), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another family": (
        lambda: retyped("gemma", build("llama")),
        "model type 'gemma' is not supported; supported are llama, mistral, qwen2, qwen3",
    ),
    "layers of another name": (
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=1)),
        "model type 'gpt2' is not supported; supported are llama",
    ),
    "images": (
        lambda: retyped("paligemma", image_models.build("gemma3")),
        "model type 'paligemma' takes images and is not supported; .* extract its language model",
    ),
    "attention to what follows": (lambda: build("gemma3", use_bidirectional_attention=True), "attend to later tokens"),
    "noisy routers": (lambda: build("mixtral", router_jitter_noise=0.1), "router_jitter_noise=0.1 would give"),
    "dynamic rope of one layer type": (dynamic_in_one_type, "rope_type 'dynamic' scales with the length"),
    "dynamic rope": (
        lambda: build("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
        "rope_type 'dynamic' scales with the length",
    ),
    "longrope": (longrope, "rope_type 'longrope' scales with the length"),
    "a forward of its own": (own_forward, "Capped overrides forward.*use LlamaForCausalLM"),
    "a configuration of its own": (of_its_own_kind, "Model has its own configuration class, Config"),
    "a forward hook": (hooked, "Qwen3ForCausalLM has a forward hook"),
    "another head": (other_head, "the output head of model type 'qwen3' must be nn.Linear, got Sequential"),
    "attention dropout": (lambda: build(attention_dropout=0.1), "attention_dropout=0.1 in training mode"),
    "LoRA dropout": (with_dropout, r"lora_dropout.*p=0.1 in training mode; set it to 0"),
    "prefix tuning": (prefix_tuned, "PrefixTuningConfig adds virtual tokens"),
    "aLoRA": (
        adapted(LoraConfig(task_type="CAUSAL_LM", target_modules=Q, alora_invocation_tokens=[1])),
        "adapter ALoraLinearVariant at .*use plain LoRA",
    ),
    "Poly": (adapted(PolyConfig(task_type="CAUSAL_LM", target_modules=Q)), "PolyModel has its own forward"),
    "dropped ranks": (adapted(LoHaConfig(target_modules=Q, rank_dropout=0.1)), r"q_proj' has rank_dropout=0\.1"),
    "dropped rotations": (
        adapted(OFTConfig(target_modules=Q, r=2, oft_block_size=0, module_dropout=0.1)),
        r"oft_dropout.* has p=0\.1",
    ),
    "batch norm": (with_batch_norm, r"BatchNorm1d 'model\.layers\.0\.mlp\.norm' averages over its batch"),
    "noise on the embedding": (with_noisy_embedding, "forward hook neftune_post_forward_hook.*neftune_noise_alpha"),
    "no language model": (lambda: nn.Linear(2, 2), "needs a Hugging Face causal language model.*got Linear"),
    "no head": (lambda: build().model, "Qwen3Model has no output head"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inexact_features_are_refused_by_name(name: str) -> None:
    make, message = REFUSED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make()
    with pytest.raises(UnsupportedError, match=message):
        forward(model, FOREST)


def test_recurrent_layers_of_an_old_transformers_are_refused_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_model.transformers, "__version__", "5.14.1")
    message = r"'bamba' has recurrent layers.*transformers 5\.15 or newer, got 5\.14\.1"
    with pytest.raises(UnsupportedError, match=message):
        forward(retyped("bamba", build()), FOREST)
    monkeypatch.setattr(tree_model.transformers, "__version__", "5.15.0.dev0")
    assert forward(retyped("bamba", build()), FOREST).logprobs.shape == (FOREST.num_tokens,)


@pytest.mark.parametrize("name", ["noise on the embedding", "dropped ranks", "Poly", "batch norm"])
def test_a_patch_refuses_what_would_not_be_exact(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message):
        patch(make())


def test_features_that_change_no_value_are_accepted() -> None:
    model = build()
    model.enable_input_require_grads()
    for harmless in (model, with_dropout().eval()):
        assert forward(harmless, FOREST).logprobs.shape == (FOREST.num_tokens,)


def test_a_subclass_of_a_known_configuration_is_known() -> None:
    class Config(LlamaConfig):
        pass

    model = build("llama")
    expected = forward(model, FOREST).logprobs
    model.config.__class__ = Config
    assert torch.equal(forward(model, FOREST).logprobs, expected)
