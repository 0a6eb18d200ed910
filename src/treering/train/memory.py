"""Fit a step into memory: how many tokens it computes at one time, and which activations of partitions it keeps.

`max_tokens="auto"` fills the device's free memory by measured bytes per token, and halves the number if that fails.
"""

import gc
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from treering.model.forward import hidden_states
from treering.model.layers import Layers, layers_of
from treering.model.tree_model import TreeModel
from treering.ranks.group import RankGroup, agreeing
from treering.ranks.setup import RanksMode
from treering.tree.forest import Forest

USABLE_SHARE = 0.8
"""Share of free memory to use; the rest is for gateway gradients, temporaries and fragmentation."""


MaxTokens: TypeAlias = int | Literal["auto"] | None
"""Limit on the distinct tokens computed at one time; "auto" follows free memory, None sets no limit."""

DEFAULT_TOKENS = 16_384
"""The value of "auto" on a CPU, where memory is seldom short."""

LEAST_TOKENS = 256
"""Below this number an out-of-memory error is raised: the weights themselves leave no room."""

_HEAD_SHARE = 1 / 4
"""Share of the free memory reserved for logits and temporaries."""

_BUDGETS: WeakKeyDictionary[nn.Module, dict[Layers, int]] = WeakKeyDictionary()
"""Smallest number so far per model and way its layers run, so that most steps of a model have the same plan."""

T = TypeVar("T")


def tokens_that_fit(model: TreeModel, weights: Iterable[Tensor], mode: RanksMode | None = None) -> int:
    """Return the number of tokens whose activations fit into free memory; call it inside `tree_attention`.

    Memory is read in each step, and the number never rises: no memory is reserved for an optimizer, whose state lowers
    the number once it exists. Memory is reserved for gradients that do not exist yet, and for logits. Returns
    `DEFAULT_TOKENS` if the decoder is frozen and saves nothing.

    Args:
        model: the model.
        weights: weights of the model and of a value head.
        mode: how ranks keep step; None if one rank trains by itself.

    Example: 40 GB free and 1 MB a token give 29,952 tokens for a model whose gradients exist.
    """
    if model.device.type != "cuda":
        return DEFAULT_TOKENS
    budgets, layers = _BUDGETS.setdefault(model.decoder, {}), layers_of(model.decoder)
    found = _measured(model, weights, mode)
    budgets[layers] = min(found, budgets.get(layers, found))
    return budgets[layers]


def run_by_memory(model: TreeModel, weights: Iterable[Tensor], run: Callable[[int], T], first: Callable[[], int]) -> T:
    """Run a step with as many tokens at a time as fit, and retry with half of them if memory runs out.

    Args:
        model: the model.
        weights: weights whose gradients the step adds; before a retry, their gradients are cleared.
        run: the step, called with the number of tokens.
        first: returns the number to begin with.

    Raises:
        torch.OutOfMemoryError: memory ran out with `LEAST_TOKENS`, or a retry would lose gradients of earlier steps.

    Warns:
        RuntimeWarning: memory ran out; names both numbers.
    """
    weights, tokens = list(weights), first()
    had_gradients = any(weight.grad is not None for weight in weights)
    while True:
        try:
            return run(tokens)
        except torch.OutOfMemoryError as error:
            # The traceback holds the frames of the failed step, and so its tensors; reference cycles hold others.
            failure = error.with_traceback(None)
        if had_gradients or tokens <= LEAST_TOKENS:
            raise failure
        for weight in weights:
            weight.grad = None
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
        _BUDGETS.setdefault(model.decoder, {})[layers_of(model.decoder)] = tokens // 2
        warnings.warn(
            f"memory ran out with max_tokens={tokens:,}, so this step and later ones run with {tokens // 2:,}; set "
            f"max_tokens={tokens // 2} to save the failed attempt",
            RuntimeWarning,
            stacklevel=3,
        )
        tokens //= 2


def fewest_on_ranks(rank_group: RankGroup, own: Callable[[], int]) -> int:
    """Return the smallest number over all ranks; every rank must call it, with a function that finds its own.

    Raises:
        StateError: on every rank, if another rank raised in `own`.
    """
    with agreeing(rank_group) as agreement:
        agreement.what, agreement.max_tokens = 'max_tokens="auto"', own()
    return agreement.max_tokens


def _measured(model: TreeModel, weights: Iterable[Tensor], mode: RanksMode | None = None) -> int:
    each = bytes_per_token(model)
    if model.shards is not None:
        model.shards.release()
    if each == 0:
        return DEFAULT_TOKENS
    to_come = sum(_bytes_to_come(weight, model, mode) for weight in weights)
    fitting = int((free_memory(model.device) * (1 - _HEAD_SHARE) - to_come) / each)
    return max(LEAST_TOKENS, fitting // LEAST_TOKENS * LEAST_TOKENS)


def _bytes_to_come(weight: Tensor, model: TreeModel, mode: RanksMode | None) -> int:
    """Return the bytes a step allocates for a weight: its gradient, and both in full if a shard is gathered."""
    from torch.distributed.tensor import DTensor

    is_shard = isinstance(weight, DTensor)
    # Ranks sum gradients of whole weights separately from the existing ones.
    needs_gradient = weight.requires_grad and (weight.grad is None or (mode is not None and not is_shard))
    num_bytes = needs_gradient * (weight.to_local() if isinstance(weight, DTensor) else weight).nbytes
    if not is_shard or mode != "gathered":
        return num_bytes
    dtype = weight.dtype if model.shards is None or model.shards.dtype is None else model.shards.dtype
    return num_bytes + (1 + weight.requires_grad) * weight.numel() * dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentsChoice:
    """What happens to a partition's activations while the partitions below it run.

    Attributes:
        keeps: True: activations stay, and nothing is computed twice. False: they are dropped and computed again before
            the backward; keys and values stay. Both give the same gradients.
        reason: explanation for the log.
    """

    keeps: bool
    reason: str


def choose_parents(model: TreeModel, chain_tokens: int) -> ParentsChoice:
    """Keep activations if they fit into free memory, else recompute them, which costs one forward.

    Args:
        model: the model; the caller is inside `tree_attention`.
        chain_tokens: tokens of the longest chain of partitions.

    Example: a chain of 10,000 tokens at 1 MB each is kept in 20 GB of free memory, and recomputed with 5 GB.
    """
    needed, free = chain_tokens * bytes_per_token(model), free_memory(model.device)
    reason = (
        f"the longest chain of partitions holds {chain_tokens:,} tokens, about {needed / 1e9:.2f} GB of activations, "
        f"and {free / 1e9:.2f} GB are free"
    )
    return ParentsChoice(keeps=needed <= free, reason=reason)


def free_memory(device: torch.device) -> float:
    """Return the bytes of the model's device that activations may take."""
    if device.type == "cpu":
        return _free_host_bytes() * USABLE_SHARE
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (free + unused) * USABLE_SHARE


def _free_host_bytes() -> int:
    """Return the memory available without swapping on Linux, all physical memory elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    available = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(available[0]) * 1024 if available else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


PROBE_TOKENS = (19, 53)
"""Two lengths to compare saved bytes at: the difference cancels the constant part. Neither may equal a number of heads
or a head size: compilers would treat the two as the same size, and build one more graph."""


def saved_bytes(run: Callable[[], object], model: TreeModel) -> int:
    """Return the bytes that a forward saves for its backward: storages other than weights, each counted once.

    Args:
        run: the forward; no backward follows it.
        model: the model, whose weights are not counted.
    """
    weights = {_storage(weight) for module in (model.decoder, model.head) for weight in module.parameters()}
    storages: dict[int, int] = {}
    held: list[Tensor] = []

    # No backward follows, so nothing is packed: a tensor with its graph would be held by that graph and never freed.
    # Compiling this would specialise graphs on addresses.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pack(tensor: Tensor) -> None:
        if _storage(tensor) not in weights:
            storages[_storage(tensor)] = tensor.untyped_storage().nbytes()
            held.append(tensor.detach())

    with saved_tensors_hooks(pack, _unread):
        result = run()
    del result
    return sum(storages.values())


_MEASURED: WeakKeyDictionary[nn.Module, dict[object, float]] = WeakKeyDictionary()


def bytes_per_token(model: TreeModel) -> float:
    """Return the bytes that a forward saves per token, from two short forwards; call it inside `tree_attention`.

    The result is cached per model and state (trained weights, dtypes, mode, checkpointing, attention) for the life of
    the model.
    """
    known = _MEASURED.setdefault(model.decoder, {})
    state = _state_of(model)
    if state not in known:
        few, more = (
            saved_bytes(lambda n=n: hidden_states(model, Forest.from_sequences([[0] * n])), model)  # type: ignore[misc]
            for n in PROBE_TOKENS
        )
        known[state] = (more - few) / (PROBE_TOKENS[1] - PROBE_TOKENS[0])
    return known[state]


def _state_of(model: TreeModel) -> object:
    """Return the key of everything that decides how much a forward saves."""
    device = model.device.type
    # All ranks measure shards together, but each measures gathered weights itself: neither may use the other's result.
    weights = [(type(weight), weight.dtype, weight.requires_grad) for weight in model.decoder.parameters()]
    modules = [(module.training, getattr(module, "gradient_checkpointing", None)) for module in model.decoder.modules()]
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    how = (cast, model.config._attn_implementation, layers_of(model.decoder))
    return device, how, hash(tuple(weights)), hash(tuple(modules))


def _unread(packed: None) -> Tensor:
    raise AssertionError("a forward that is only measured has no backward")


def _storage(tensor: Tensor) -> int:
    # Addresses are reused while a forward of shards runs, and shards themselves have none.
    return int(tensor.untyped_storage()._cdata)
