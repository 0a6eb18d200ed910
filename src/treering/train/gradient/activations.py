"""What becomes of a partition's activations while those below it run, and how many bytes they take.

Kept, recomputed or offloaded: the choice compares the bytes of the longest chain of partitions with free memory.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from treering.errors import ConfigError
from treering.model.families import ModelParts
from treering.model.forward import hidden_states
from treering.model.layers import layers_of
from treering.tree.forest import Forest

Parents = Literal["keep", "recompute", "offload"]
"""keep: activations stay, and nothing is computed twice. recompute: they are dropped and computed again before the
backward; keys and values stay. offload: they move to host memory."""

ParentsOption = Literal["auto", "keep", "recompute", "offload"]

USABLE_SHARE = 0.8
"""Share of free memory to use; the rest is for gateway gradients, temporaries and fragmentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentsChoice:
    """The choice and its reason, in words for a log."""

    parents: Parents
    reason: str


def check_parents(requested: str, device: torch.device) -> None:
    """Checks the option `parents`.

    Raises:
        ConfigError: an unknown option, or an offload of a model on the host.
    """
    if requested not in get_args(ParentsOption):
        raise ConfigError(f"parents is one of {', '.join(get_args(ParentsOption))}, got {requested!r}; choose one")
    if requested == "offload" and device.type == "cpu":
        raise ConfigError(
            'parents="offload" moves activations to host memory, and the model is there already; use "keep" or '
            '"recompute"'
        )


def fastest_parents(
    *, chain_tokens: int, bytes_per_token: float, free_bytes: float, free_host_bytes: float | None
) -> ParentsChoice:
    """The fastest way that fits: keep, then offload, then recompute.

    All three give the same gradients, bitwise if the device computes deterministically.

    Args:
        chain_tokens: tokens of the longest chain of partitions.
        bytes_per_token: bytes that a forward saves for its backward.
        free_bytes: free memory on the model's device.
        free_host_bytes: free host memory; None if the model is on the host.

    Example: a chain of 10,000 tokens at 1 MB each is kept in 20 GB of free memory, offloaded with 5 GB free on the
    device and 20 GB on the host, and recomputed with 5 GB on both.
    """
    needed = chain_tokens * bytes_per_token
    said = (
        f"auto: the longest chain of partitions holds {chain_tokens:,} tokens, about {needed / 1e9:.2f} GB of "
        f"activations, and {free_bytes / 1e9:.2f} GB are free"
    )
    if needed <= free_bytes:
        return ParentsChoice(parents="keep", reason=said)
    if free_host_bytes is not None and needed <= free_host_bytes:
        return ParentsChoice(parents="offload", reason=f"{said}; the host has {free_host_bytes / 1e9:.2f} GB")
    return ParentsChoice(parents="recompute", reason=said)


def free_memory(device: torch.device) -> tuple[float, float | None]:
    """Bytes free for activations on the model's device, and on the host: None if it is that device."""
    host = _free_host_bytes() * USABLE_SHARE
    if device.type == "cpu":
        return host, None
    if device.type != "cuda":
        return float("inf"), host
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (free + unused) * USABLE_SHARE, host


def _free_host_bytes() -> int:
    """On Linux the memory available without swapping; elsewhere all physical memory."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    available = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(available[0]) * 1024 if available else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


PROBE_TOKENS = (16, 48)
"""Two lengths to compare saved bytes at: the difference cancels the constant part."""


class _OnHost(NamedTuple):
    tensor: Tensor
    device: torch.device


def saved_bytes(run: Callable[[], object], parts: ModelParts) -> int:
    """Bytes that a forward saves for its backward: storages that are not weights, each counted once.

    Args:
        run: the forward; its result has no backward.
        parts: of the model; its weights are not counted.
    """
    weights = _weight_storages(parts)
    storages: dict[int, int] = {}
    held: list[Tensor] = []

    # There is no backward, so nothing is packed: a tensor with its graph would be held by that graph and never freed.
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


def bytes_per_token(parts: ModelParts) -> float:
    """Bytes that a forward saves per token, from two short forwards; call it inside `tree_attention`.

    Measured once for a model in a state (what is trained, dtypes, mode, checkpointing, attention), and then kept as
    long as the model is.
    """
    known = _MEASURED.setdefault(parts.decoder, {})
    state = _state_of(parts)
    if state not in known:
        known[state] = _measure_bytes_per_token(parts)
    return known[state]


def _state_of(parts: ModelParts) -> object:
    """What decides how much a forward saves."""
    device = parts.device.type
    weights = [(weight.dtype, weight.requires_grad) for weight in parts.decoder.parameters()]
    modules = [(module.training, getattr(module, "gradient_checkpointing", None)) for module in parts.decoder.modules()]
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    how = (cast, parts.config._attn_implementation, layers_of(parts.decoder))
    return device, how, hash(tuple(weights)), hash(tuple(modules))


def _measure_bytes_per_token(parts: ModelParts) -> float:
    few, more = (
        saved_bytes(lambda n=n: hidden_states(parts, Forest.from_sequences([[0] * n])), parts)  # type: ignore[misc]
        for n in PROBE_TOKENS
    )
    return (more - few) / (PROBE_TOKENS[1] - PROBE_TOKENS[0])


@contextmanager
def saved_on_host(parts: ModelParts) -> Iterator[None]:
    """Context manager that moves saved tensors to the host, except weights.

    If the model is on the host, nothing moves.
    """
    weights = _weight_storages(parts)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pack(tensor: Tensor) -> Tensor | _OnHost:
        if tensor.device.type == "cpu" or _storage(tensor) in weights:
            return tensor
        return _OnHost(_to_host(tensor), tensor.device)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def unpack(packed: Tensor | _OnHost) -> Tensor:
        return packed.tensor.to(packed.device, non_blocking=True) if isinstance(packed, _OnHost) else packed

    with saved_tensors_hooks(pack, unpack):
        yield


def _unread(packed: None) -> Tensor:
    raise AssertionError("a forward that is only measured has no backward")


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor)


def _weight_storages(parts: ModelParts) -> set[int]:
    return {_storage(weight) for module in (parts.decoder, parts.head) for weight in module.parameters()}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
