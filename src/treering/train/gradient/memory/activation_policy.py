"""Choose what to do with a partition's activations while the partitions below it run: keep, recompute or offload.

The choice compares the bytes of the longest chain of partitions with free memory.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from treering.errors import ConfigError
from treering.types import is_count

Parents = Literal["keep", "recompute", "offload"]
"""keep: activations stay, and nothing is computed twice. recompute: they are dropped and computed again before the
backward; keys and values stay. offload: they move to host memory."""

ParentsOption = Literal["auto", "keep", "recompute", "offload"]

USABLE_SHARE = 0.8
"""Share of free memory to use; the rest is for gateway gradients, temporaries and fragmentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationMemory:
    """The sizes that a choice depends on.

    Attributes:
        chain_tokens: tokens of the longest chain of partitions.
        bytes_per_token: bytes that a forward saves for its backward.
        free_bytes: free memory on the model's device.
        free_host_bytes: free host memory; None if the model is on the host.
    """

    chain_tokens: int
    bytes_per_token: float
    free_bytes: float
    free_host_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentsChoice:
    """The choice and its reason, in words for a log."""

    parents: Parents
    reason: str


def check_parents(requested: str, device: torch.device, max_bytes: int | None) -> None:
    """Checks the options `parents` and `max_bytes`.

    Raises:
        ConfigError: an unknown option, an offload of a model on the host, or no bytes.
    """
    if requested not in get_args(ParentsOption):
        raise ConfigError(f"parents is one of {', '.join(get_args(ParentsOption))}, got {requested!r}; choose one")
    if requested == "offload" and device.type == "cpu":
        raise ConfigError(
            'parents="offload" moves activations to host memory, and the model is there already; use "keep" or '
            '"recompute"'
        )
    if max_bytes is not None and not is_count(max_bytes, least=1):
        raise ConfigError(f"max_bytes is a positive number of bytes, or None for what is free, got {max_bytes!r}")


def choose_parents(requested: ParentsOption, measure: Callable[[], ActivationMemory]) -> ParentsChoice:
    """The requested option, or for "auto" the fastest that fits: keep, then offload, then recompute.

    All three give the same gradients, bitwise if the device computes deterministically.

    Example: a chain of 10,000 tokens at 1 MB each is kept in 20 GB of free memory, offloaded with 5 GB free on the
    device and 20 GB on the host, and recomputed with 5 GB on both.
    """
    if requested != "auto":
        return ParentsChoice(parents=requested, reason="as requested")
    memory = measure()
    needed = memory.chain_tokens * memory.bytes_per_token
    said = (
        f"auto: the longest chain of partitions holds {memory.chain_tokens:,} tokens, about {needed / 1e9:.2f} GB of "
        f"activations, and {memory.free_bytes / 1e9:.2f} GB are free"
    )
    if needed <= memory.free_bytes:
        return ParentsChoice(parents="keep", reason=said)
    if memory.free_host_bytes is not None and needed <= memory.free_host_bytes:
        return ParentsChoice(parents="offload", reason=f"{said}; the host has {memory.free_host_bytes / 1e9:.2f} GB")
    return ParentsChoice(parents="recompute", reason=said)


def free_memory(device: torch.device, max_bytes: int | None) -> tuple[float, float | None]:
    """Bytes free for activations on the model's device, or `max_bytes`; and on the host, None if it is that device."""
    host = _free_host_bytes() * USABLE_SHARE
    if device.type == "cpu":
        return (host if max_bytes is None else float(max_bytes)), None
    if max_bytes is not None or device.type != "cuda":
        return (float("inf") if max_bytes is None else float(max_bytes)), host
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
