"""Choose the attention backend: the requested one, or for `auto` the first rule in a table that fits."""

from typing import Literal, NamedTuple, get_args

import torch

from treering.attention.triton import MAX_HEAD_SIZES, has_triton
from treering.errors import ConfigError

Backend = Literal["segments", "reference", "flex", "triton"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


class Choice(NamedTuple):
    """A backend and the reason for it, in words for a log."""

    backend: Backend
    reason: str


class Rule(NamedTuple):
    """Where `auto` takes a backend, and why.

    Attributes:
        backend: what is taken.
        device: type of device it is taken on; None for any.
        max_head_sizes: largest head by dtype; None where it takes any.
        needs_triton: whether triton must be installed.
        reason: in words.
    """

    backend: Backend
    device: str | None
    max_head_sizes: dict[torch.dtype, int] | None
    needs_triton: bool
    reason: str

    def fits(self, device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
        """Whether the rule holds for tensors of this kind."""
        is_there = self.device in (None, device.type) and (has_triton() or not self.needs_triton)
        largest = head_size if self.max_head_sizes is None else self.max_head_sizes.get(dtype, 0)
        return is_there and head_size <= largest


_UNMEASURED = "by design, not yet by a measurement"

RULES = (
    Rule("segments", "cpu", None, False, "the fastest that is exact on CPU, as measured"),
    Rule("triton", "cuda", dict(MAX_HEAD_SIZES), True, f"kernels of our own for CUDA, {_UNMEASURED}"),
    Rule("flex", "cuda", {torch.float32: 256}, True, f"no kernel of ours takes float32 heads over 128, {_UNMEASURED}"),
    Rule("segments", None, None, False, "the only one that is exact for this device, dtype and head size"),
)
"""What `auto` goes through from the top; the last rule always fits."""


def choose_backend(
    requested: str,
    device: torch.device | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    head_size: int = 64,
) -> Choice:
    """The backend that runs for `requested` ("auto" or a name) and why.

    Args:
        requested: "auto", or a name from `BACKENDS`.
        device: where the tensors are; None for the CPU.
        dtype: of keys and values.
        head_size: of queries and keys.

    Raises:
        ConfigError: no such backend.

    Example:
        >>> choose_backend("auto", torch.device("cpu")).backend
        'segments'
    """
    if requested == "auto":
        where = device or torch.device("cpu")
        rule = next(rule for rule in RULES if rule.fits(where, dtype, head_size))
        return Choice(rule.backend, f"auto: {rule.reason}")
    for backend in BACKENDS:
        if backend == requested:
            return Choice(backend, "as requested")
    raise ConfigError(f"unknown attention backend {requested!r}: choose auto, {', '.join(BACKENDS)}")
