"""Tiny Hugging Face models and the flat specification: every branch as its own sequence, through the stock forward."""

from collections.abc import Callable, Sequence

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

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
_ALTERNATING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8}
_QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
_SCALES = {"logits_scaling": 4.0, "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4}
_CAPS = {"sliding_window": 6, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
_FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "mistral window": ("Mistral", {"sliding_window": 6, "head_dim": 8}),
    "qwen2 window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "gemma2": ("Gemma2", {**_GEMMA, **_CAPS}),
    "gemma3": ("Gemma3", {**_GEMMA, **_ALTERNATING}),
    "gpt_oss": ("GptOss", {"head_dim": 8, **_ALTERNATING, **_EXPERTS}),
    "mixtral": ("Mixtral", _EXPERTS),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 8, **_QWEN_EXPERTS}),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.5, "sliding_window": 6, "pad_token_id": None}),
    "granite": ("Granite", _SCALES),
    "olmo2": ("Olmo2", {"pad_token_id": None}),
    "smollm3": (
        "SmolLM3",
        {"no_rope_layers": [1, 0], "use_sliding_window": True, **_ALTERNATING, "pad_token_id": None},
    ),
    "glm4": ("Glm4", {"head_dim": 8, "partial_rotary_factor": 0.5, "pad_token_id": None}),
}
"""Names of transformers' classes, and what their configurations add to `_SHAPE`; a default `pad_token_id` beyond the
vocabulary must go."""

FAMILIES = tuple(_FAMILIES)
EXPERTS = ("gpt_oss", "mixtral", "qwen3_moe")
_WITHOUT_SDPA = ("gemma2", "gpt_oss")
"""Torch's kernel supports neither softcap nor sinks."""

_NORMS_AROUND_ONE = ("Gemma2RMSNorm", "Gemma3RMSNorm")


class WideNorm(nn.Module):
    """RMSNorm in the dtype of its input; the stock one rounds to float32, which costs 2e-7."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.weight = stock.weight
        self.eps = getattr(stock, "variance_epsilon", None) or stock.eps
        self.shift = 1.0 if type(stock).__name__ in _NORMS_AROUND_ONE else 0.0

    def forward(self, x: Tensor) -> Tensor:
        return (self.shift + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class WideRouter(nn.Module):
    """Top-k router in the dtype of its input; the stock ones take their softmax in float32."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.weight = stock.weight
        self.top_k = stock.top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x.reshape(-1, x.shape[-1]), self.weight)
        scores, chosen = logits.softmax(-1).topk(self.top_k, -1)
        return logits, scores / scores.sum(-1, keepdim=True), chosen


def wide_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Hugging Face's eager attention in the dtype of its inputs; the stock one takes its softmax in float32."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).mT * scaling
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores + attention_mask
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2), None


AttentionInterface.register("wide", wide_attention)
AttentionMaskInterface.register("wide", eager_mask)


class WideRotary(nn.Module):
    """Rotary tables in float64; the stock ones are computed in float32, equally on both sides."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.inv_freq = stock.inv_freq.double()
        self.scaling = stock.attention_scaling
        self.copies = 1 if type(stock).__name__.startswith("GptOss") else 2

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * self.inv_freq
        angles = torch.cat((angles,) * self.copies, -1)
        return (angles.cos() * self.scaling).to(x.dtype), (angles.sin() * self.scaling).to(x.dtype)


def build(family: str = "qwen3", seed: int = 0, **overrides: object) -> PreTrainedModel:
    """Build a stock model with random weights, float32, in training mode."""
    name, extra = _FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")(
        **{**_SHAPE, **extra, **overrides}
    )
    if family in _WITHOUT_SDPA:
        config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for weight in model.parameters():
            # Zero biases and unit norms would hide errors in them; small weights would hide errors in attention.
            weight.add_(torch.randn_like(weight) * (0.3 if weight.dim() == 1 else 0.1))
    return model.train()


def build_float64(family: str = "qwen3", seed: int = 0, **overrides: object) -> PreTrainedModel:
    """Return `build` in float64 with every float32 computation replaced, so that 1e-10 is reachable."""
    model = build(family, seed, **overrides)
    model.config._attn_implementation = "wide"
    _replace(model, lambda m: type(m).__name__.endswith("RMSNorm"), WideNorm)
    _replace(model, lambda m: type(m).__name__.endswith("RotaryEmbedding") and hasattr(m, "inv_freq"), WideRotary)
    _replace(model, lambda m: type(m).__name__ in ("MixtralTopKRouter", "Qwen3MoeTopKRouter"), WideRouter)
    return model.double()


def _replace(model: nn.Module, matches: Callable[[nn.Module], bool], wrap: Callable[[nn.Module], nn.Module]) -> None:
    for name, child in list(model.named_children()):
        if matches(child):
            setattr(model, name, wrap(child))
        else:
            _replace(child, matches, wrap)


def flat_logprobs(model: nn.Module, sequence: Sequence[int], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the log-probability of every token but the first, and its distribution's entropy: [length - 1] each."""
    ids = torch.tensor([list(sequence)])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return gradients by parameter name, zero where a parameter has none, and clear the model's."""
    grads = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    model.zero_grad(set_to_none=True)
    return grads


def global_norm(grads: dict[str, Tensor]) -> float:
    return float(torch.stack([grad.double().norm() for grad in grads.values()]).norm())


def assert_gradients_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Check law 2: relative L2 error per parameter, with a floor of `tolerance` times its share of the global norm."""
    assert actual.keys() == expected.keys()
    floor = 1e-3 * global_norm(expected)
    for name, grad in expected.items():
        error = float((actual[name] - grad).double().norm())
        scale = max(float(grad.double().norm()), floor)
        assert error <= tolerance * scale, f"{name}: gradient error {error / max(scale, 1e-300):.2e} > {tolerance:.0e}"
