"""Flat specification of router losses: all sequences padded into one stock forward, Hugging Face's own formula."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.mixtral import modeling_mixtral

from treering.config.steps import RouterLosses


def wide_balance_loss() -> Any:
    """Return Hugging Face's `load_balancing_loss_func` with its float32 parts in float64."""
    source = inspect.getsource(modeling_mixtral.load_balancing_loss_func)
    assert ".float()" in source
    names: dict[str, Any] = {"torch": torch}
    exec(source.replace("torch.float32", "torch.float64").replace(".float()", ".double()"), names)
    return names["load_balancing_loss_func"]


def routers_of(model: nn.Module) -> list[nn.Module]:
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = (getattr(layer.mlp, "gate", getattr(layer.mlp, "router", None)) for layer in base.model.layers)
    return [router for router in found if router is not None]


def padded(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask [K, longest], padded on the right."""
    ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)], mask[row, : len(sequence)] = torch.tensor(sequence), 1
    return ids, mask


def flat_router_terms(model: nn.Module, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Compute the balance and z loss of all sequences in one forward."""
    logits: list[Tensor] = []
    handles = [r.register_forward_hook(lambda _m, _i, output: logits.append(output[0])) for r in routers_of(model)]
    ids, mask = padded(sequences)
    config: Any = model.config
    model(input_ids=ids, attention_mask=mask, use_cache=False)
    for handle in handles:
        handle.remove()
    experts = logits[0].shape[-1]
    balance = wide_balance_loss()(tuple(logits), experts, config.num_experts_per_tok, mask)
    # Check that no float32 part is left, however the installed version casts.
    assert balance.dtype == torch.float64
    rows = [layer[mask.reshape(-1) == 1] for layer in logits]
    squares = [torch.log(torch.exp(row).sum()) ** 2 for layer in rows for row in layer]
    return balance, torch.stack(squares).mean()


def flat_router_loss(model: nn.Module, sequences: Sequence[Sequence[int]], losses: RouterLosses) -> Tensor:
    balance, z = flat_router_terms(model, sequences)
    return losses.balance * balance + losses.z * z
