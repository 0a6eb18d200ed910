"""How a loop computes its steps: precision, memory, threads, and each rank's share."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from treering.config.steps import Autocast, ComputeOptions
from treering.model.layers import choose_layers, enable_gradient_checkpointing, layers_of, set_layers
from treering.model.tree_model import TreeModel
from treering.ranks.group import RankGroup
from treering.ranks.setup import prepare
from treering.train.loop.batches import StepBatch
from treering.train.memory import DEFAULT_TOKENS
from treering.tree.plan import share_among_ranks


def tokens_on_ranks(options: ComputeOptions) -> int:
    """Return the token limit if all ranks need the same plan; free memory differs between ranks, so it is not used."""
    return DEFAULT_TOKENS if options.max_batch_tokens == "auto" else options.max_batch_tokens


def prepare_model(
    model: nn.Module, options: ComputeOptions, *, num_steps: int | None = None, num_ranks: int = 1
) -> tuple[str, ...]:
    """Set training mode, gradient checkpointing and layers as the options say, on every rank that trains the model.

    `num_steps` is the length of the whole run: "auto" compiles for long runs.

    Returns a sentence if "auto" has chosen the layers on CUDA.

    Raises:
        MissingExtraError: Liger layers without liger-kernel installed.
        UnsupportedError: the model cannot recompute activations, or Liger's kernels are not exact for it.
    """
    model.train()
    enable_gradient_checkpointing(model, options.gradient_checkpointing)
    if options.layers != "auto":
        set_layers(model, options.layers)
        return ()
    device = next(model.parameters()).device
    layers, reason = choose_layers(model, num_steps, num_ranks=num_ranks, device=device)
    if layers != layers_of(model):
        set_layers(model, layers)
    return (f"layers: {layers} (auto: {reason})",) if device.type == "cuda" else ()


def precision(model: nn.Module, autocast: Autocast) -> AbstractContextManager[object]:
    """Return a context manager for the precision: bfloat16 autocast, or the weights' own dtype."""
    if autocast == "none":
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16)


SMALL = 10_000_000
"""Number of parameters below which a model computes on one thread, unless a setting overrides it."""


def fitting_threads(model: nn.Module) -> int | None:
    """Return the number of torch threads for a model: one for a small model on the CPU, else None (torch's default).

    The threads of a small product wait for each other longer than they compute, and if other processes use the cores
    they take ten times as long as one thread. Only the size decides, because sums round differently with another number
    of threads, and a resumed run must not.

    Example: a model of 0.6 M parameters gets 1, a model of 500 M parameters None.
    """
    weights = list(model.parameters())
    is_small = sum(weight.numel() for weight in weights) < SMALL
    return 1 if is_small and all(weight.device.type == "cpu" for weight in weights) else None


@contextmanager
def num_threads(count: int | None, model: nn.Module | None = None) -> Iterator[None]:
    """Make torch use `count` threads inside the context; None: those that fit the model, unchanged without a model."""
    if count is None and model is not None:
        count = fitting_threads(model)
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def peak_memory_bytes(model: nn.Module) -> int | None:
    """Return the peak memory that torch has allocated on the model's CUDA device so far; None on CPU."""
    device = next(model.parameters()).device
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def shard_model(model: nn.Module, autocast: Autocast) -> RankGroup:
    """Shard a model over all processes, with one unit per layer and one for the rest, and sum its gradients.

    Under autocast to bfloat16, weights are gathered in bfloat16; 16-bit gradients are summed in float32.

    Raises:
        UnsupportedError: a model whose gradients would not be exact.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    is_cast = autocast != "none"
    has_16_bits = is_cast or any(weight.dtype.itemsize == 2 for weight in model.parameters())
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if is_cast else None, reduce_dtype=torch.float32 if has_16_bits else None
    )
    for layer in TreeModel.of(model).layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return prepare(model)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """This rank's part of a step.

    Attributes:
        batch: this rank's forests and masks; `num_tasks` counts the whole step.
        branches: int64, indices of this rank's branches in the whole step.
    """

    batch: StepBatch
    branches: NDArray[np.int64]


def share_batch(batch: StepBatch, rank_group: RankGroup) -> Share:
    """Return this rank's share of a step, balanced by cost; every rank computes all shares for itself.

    Example: of forests with 5, 4, 3 and 3 tokens, the first of two ranks trains the forests of 5 and 3.
    """
    if rank_group.size == 1:
        return Share(batch=batch, branches=np.arange(len(batch.loss_masks)))
    own = share_among_ranks(batch.forests, rank_group.size)[rank_group.rank].forests
    first = np.cumsum([0, *(forest.num_branches for forest in batch.forests)])
    branches = np.concatenate([np.zeros(0, np.int64), *(np.arange(first[i], first[i + 1]) for i in own)])
    return Share(
        batch=replace(
            batch,
            forests=[batch.forests[i] for i in own],
            loss_masks=[batch.loss_masks[branch] for branch in branches],
        ),
        branches=branches,
    )


def sum_over_ranks(values: Mapping[str, float], rank_group: RankGroup) -> dict[str, float]:
    """Return the sum of each value over the ranks, in the order of the names."""
    names = list(values)
    totals = rank_group.sum(np.array([float(values[name]) for name in names]))
    return dict(zip(names, totals.tolist(), strict=True))


def mean_over_ranks(averages: Mapping[str, float], weight: float, rank_group: RankGroup) -> dict[str, float]:
    """Return averages over the entries of all ranks; this rank has `weight` of them, or no names and weight 0."""
    if rank_group.size == 1:
        return dict(averages)
    facts = rank_group.gather((weight, dict(averages)))
    total = max(sum(own for own, _ in facts), 1e-300)
    names = sorted({name for _, known in facts for name in known})
    return {name: sum(own * known.get(name, 0.0) for own, known in facts) / total for name in names}
