"""Tiny Hugging Face models and the flat specification: every branch as its own sequence, through the stock forward."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 32
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 4096,
    "attention_dropout": 0.0,
}
_CLASSES: dict[str, tuple[type, type[PreTrainedModel], dict[str, object]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None, "head_dim": 8}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
}
FAMILIES = tuple(_CLASSES)


class WideNorm(nn.Module):
    """RMSNorm in the dtype of its input: the stock one rounds to float32, which alone costs 2e-7."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.weight = stock.weight
        self.eps = stock.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class WideRotary(nn.Module):
    """Rotary tables in float64: the stock ones are computed in float32 (equally on both sides)."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.inv_freq = stock.inv_freq.double()

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * self.inv_freq
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def build(family: str = "qwen3", seed: int = 0, **overrides: object) -> PreTrainedModel:
    """A stock model with random weights, float32, in training mode."""
    config_class, model_class, extra = _CLASSES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**_SHAPE, **extra, **overrides}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Zero biases and unit norms would hide errors in them; small weights would hide errors in attention.
            weight.add_(torch.randn_like(weight) * (0.3 if weight.dim() == 1 else 0.1)) if weight.dim() else None
            assert name
    return model.train()


def build_float64(family: str = "qwen3", seed: int = 0, **overrides: object) -> PreTrainedModel:
    """`build` in float64 with every float32 island removed, so that 1e-10 is reachable."""
    model = build(family, seed, **overrides)
    _replace(model, lambda m: type(m).__name__.endswith("RMSNorm"), WideNorm)
    _replace(model, lambda m: type(m).__name__.endswith("RotaryEmbedding"), WideRotary)
    return model.double()


def _replace(model: nn.Module, matches: Callable[[nn.Module], bool], wrap: Callable[[nn.Module], nn.Module]) -> None:
    for name, child in list(model.named_children()):
        if matches(child):
            setattr(model, name, wrap(child))
        else:
            _replace(child, matches, wrap)


def flat_logprobs(model: nn.Module, sequence: Sequence[int], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of every token but the first, and entropy of its distribution: [length - 1] each."""
    ids = torch.tensor([list(sequence)])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by parameter name; the model's are cleared. A parameter without one counts as zero."""
    grads = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    model.zero_grad(set_to_none=True)
    return grads


def global_norm(grads: dict[str, Tensor]) -> float:
    """L2 norm over all parameters, in float64."""
    return float(torch.stack([grad.double().norm() for grad in grads.values()]).norm())


def assert_gradients_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Law 2: relative L2 error per parameter, with a floor of `tolerance` times the global norm's share."""
    assert actual.keys() == expected.keys()
    floor = 1e-3 * global_norm(expected)
    for name, grad in expected.items():
        error = float((actual[name] - grad).double().norm())
        scale = max(float(grad.double().norm()), floor)
        assert error <= tolerance * scale, f"{name}: gradient error {error / max(scale, 1e-300):.2e} > {tolerance:.0e}"
