"""Tiny Hugging Face models with recurrent layers, and a way to run them without rounding to float32.

If transformers is too old for them, importing this module skips the test file or the test that imports it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from treering.model.tree_model import RECURRENT_SINCE, transformers_release

if transformers_release() < RECURRENT_SINCE:
    pytest.skip("recurrent layers need a newer transformers", allow_module_level=True)

import transformers
from transformers import PreTrainedModel
from transformers.models.bamba import modeling_bamba
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from tests.models import VOCAB
from treering.model import recurrence_calls
from treering.model.recurrence_calls import Price

_SHAPE = {
    **{"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096, "attention_dropout": 0.0},
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}
_MAMBA = {
    **{"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 4},
    **{"mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 16},
}
_FAMILIES: dict[str, tuple[str, str, dict[str, object]]] = {
    "qwen3_next": ("Qwen3Next", "Config", {**_DELTA, **_EXPERTS}),
    "qwen3_5": ("Qwen3_5", "TextConfig", {**_DELTA, "rope_parameters": _ROPE}),
    "qwen3_5_moe": ("Qwen3_5Moe", "TextConfig", {**_DELTA, **_EXPERTS, "rope_parameters": _ROPE}),
    "bamba": ("Bamba", "Config", _MAMBA),
}
"""Names of transformers' classes, and what their configurations add to `_SHAPE`."""

HYBRIDS = tuple(_FAMILIES)
DENSE = ("qwen3_5", "bamba")
"""Models without experts, one for each kind of recurrent layer. Tests that are not about a family run on these."""

_MODULES: tuple[Any, ...] = (modeling_bamba, modeling_qwen3_5, modeling_qwen3_5_moe, modeling_qwen3_next)


def build_hybrid(family: str, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """Build a stock model with random weights, float32, in training mode."""
    name, kind, extra = _FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, name + kind)(**{**_SHAPE, **extra, **overrides})
    config._attn_implementation = "wide"
    config._experts_implementation = "eager"
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # States decay over some dozen tokens; with faster decay, nothing from before a fork would reach the
            # branches.
            if name.endswith("A_log"):
                weight.copy_(torch.linspace(-4.0, -1.0, weight.numel()))
            else:
                weight.add_(torch.randn_like(weight) * (0.3 if weight.dim() == 1 else 0.1))
    return model.train()


def build_wide(family: str, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """Return `build_hybrid` in float64; it is exact to 1e-10 only inside `no_float32`."""
    model = build_hybrid(family, seed, **overrides).double()
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq = module.inv_freq.double()
    return model


class _WideTorch:
    """`torch` as a modeling file sees it, with float64 under the name float32."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def no_float32() -> Iterator[None]:
    """Inside the block, the stock code of the hybrids computes in float64 wherever it names float32.

    Their norms, gates and scans round to float32 on purpose in dozens of places, which hides errors below 1e-7.
    """
    stock = Tensor.float

    def wide(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.double() if self.dtype in (torch.float64, torch.int64) else stock(self, *args, **kwargs)

    with ExitStack() as undo:
        for module in _MODULES:
            undo.enter_context(mock.patch.object(module, "torch", _WideTorch()))
        undo.enter_context(mock.patch.object(Tensor, "float", wide))
        yield


class Planning(NamedTuple):
    """Costs of a call and of a row, and the thresholds at which the state of a fork is kept."""

    price: Price
    thresholds: tuple[float, ...]


PLANNINGS = {
    "fork": Planning(Price(call=0, row=0), (0.0,)),
    "fork, padded": Planning(Price(call=10**9, row=0), (0.0,)),
    "rescan": Planning(Price(call=10**9, row=0), (float("inf"),)),
    "mixed": Planning(Price(call=10**9, row=0), (8.0,)),
}
"""Forks that keep their state: all, in calls of one row length; all, in few calls; none; those where it saves work."""


@contextmanager
def planned(name: str) -> Iterator[None]:
    """Inside the block, recurrent layers are planned in this way, with no bound on what is rescanned."""
    planning = PLANNINGS[name]
    with (
        mock.patch.object(recurrence_calls, "price_on", return_value=planning.price),
        mock.patch.object(recurrence_calls, "THRESHOLDS", planning.thresholds),
        mock.patch.object(recurrence_calls, "MAX_GROWTH", float("inf")),
    ):
        yield
