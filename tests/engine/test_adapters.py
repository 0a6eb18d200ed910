"""The engine samples from a model with LoRA as PEFT computes it, and never writes the trained weights."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from tests.engine.test_torch_engine import assert_same, group_requests, run
from tests.models import build, build_float64
from treering.engine.torch_engine import TorchEngine
from treering.errors import InputError, UnsupportedError

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, dict[str, object]] = {
    "some projections": {"target_modules": ["q_proj", "v_proj"]},
    "every projection": {"target_modules": EVERY, "use_rslora": True},
    "head and embedding": {"target_modules": ["o_proj", "lm_head", "embed_tokens"]},
    "a head trained in full": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "dropout": {"target_modules": EVERY, "lora_dropout": 0.3},
}


def adapted(name: str = "some projections", seed: int = 0, **options: object) -> PeftModel:
    config = LoraConfig(**{"r": 4, "init_lora_weights": False, **CONFIGS[name], **options})
    base = build_float64("qwen3")
    torch.manual_seed(seed)
    model = get_peft_model(base, config).double()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.mul_(3.0)
    return model


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize(("name", "backend"), [*((name, "fused") for name in CONFIGS), ("every projection", "plain")])
def test_logprobs_are_those_of_peft(name: str, backend: str) -> None:
    model = adapted(name)
    before = weights_of(model)
    requests = group_requests(4, 2, temperature=0.8)
    rollouts = run(TorchEngine(model, max_batch=8, backend=backend), requests)
    assert all(torch.equal(weight, before[key]) for key, weight in model.named_parameters())
    assert model.training
    model.eval()
    for request in requests:
        rollout = rollouts[request.key]
        ids = torch.from_numpy(np.concatenate([request.prompt, rollout.tokens])).long()
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, request.prompt.size - 1 : -1] / 0.8
        expected = logits.log_softmax(-1).gather(1, ids[request.prompt.size :, None])[:, 0]
        np.testing.assert_allclose(rollout.policy_logprobs, expected.numpy(), atol=1e-10)


def test_training_changes_rollouts_at_the_update_and_not_before() -> None:
    model, other = adapted(), adapted(seed=5)
    requests = group_requests(3, 2)
    engine = TorchEngine(model)
    before = run(engine, requests)
    model.load_state_dict(other.state_dict())
    assert_same(run(engine, requests), before)
    with pytest.raises(InputError, match="have changed"):
        engine.update_weights(0)
    engine.update_weights(1)
    engine.update_weights(1)
    after = run(engine, requests)
    assert_same(after, run(TorchEngine(other), requests))
    assert any(after[key].tokens.tolist() != before[key].tokens.tolist() for key in before)


def test_disabled_and_merged_adapters_count_as_peft_counts_them() -> None:
    model, requests = adapted(), group_requests(2, 2)
    whole = run(TorchEngine(model), requests)
    with model.disable_adapter():
        assert_same(run(TorchEngine(model), requests), run(TorchEngine(build_float64("qwen3")), requests))
    model.merge_adapter()
    assert_same(run(TorchEngine(model), requests), whole)


def test_a_bfloat16_weight_is_rounded_once() -> None:
    base = build("qwen3").bfloat16()
    model = get_peft_model(base, LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"]))
    engine = TorchEngine(model)
    layer = base.model.layers[0].self_attn.q_proj
    merged = (layer.base_layer.weight.float() + layer.get_delta_weight("default").float()).bfloat16()
    assert torch.equal(engine._weights.layers[0].qkv[: merged.shape[0]], merged)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "DoRA": (lambda: adapted(use_dora=True), "layer 0: self_attn.q_proj.*use_dora=False"),
    "trained rows of a table": (lambda: adapted(trainable_token_indices=[1, 2]), "the embedding is a"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_that_is_not_plain_lora_is_refused_by_name(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message):
        TorchEngine(make())
