"""Choose the attention backend: the requested one, or for `auto` the first rule in a table that fits."""

from typing import Literal, NamedTuple, get_args

import torch

from treering.attention.triton import MAX_HEAD_SIZES, has_triton
from treering.errors import ConfigError

Backend = Literal["segments", "reference", "flex", "triton"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


class BackendChoice(NamedTuple):
    """A backend and the reason for it, in words for a log."""

    backend: Backend
    reason: str


class BackendRule(NamedTuple):
    """When `auto` chooses a backend, and why.

    Attributes:
        backend: the choice.
        device: required device type; None for any.
        max_head_sizes: largest head size by dtype; None for no limit.
        needs_triton: whether triton must be installed.
        reason: in words.
    """

    backend: Backend
    device: str | None
    max_head_sizes: dict[torch.dtype, int] | None
    needs_triton: bool
    reason: str

    def fits(self, device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
        """Whether the rule applies to tensors of this kind."""
        is_there = self.device in (None, device.type) and (has_triton() or not self.needs_triton)
        largest = head_size if self.max_head_sizes is None else self.max_head_sizes.get(dtype, 0)
        return is_there and head_size <= largest


_UNMEASURED = "by design, not yet by a measurement"

RULES = (
    BackendRule("segments", "cpu", None, False, "the fastest that is exact on CPU, as measured"),
    BackendRule("triton", "cuda", dict(MAX_HEAD_SIZES), True, f"kernels of our own for CUDA, {_UNMEASURED}"),
    BackendRule(
        "flex", "cuda", {torch.float32: 256}, True, f"no kernel of ours takes float32 heads over 128, {_UNMEASURED}"
    ),
    BackendRule("segments", None, None, False, "the only one that is exact for this device, dtype and head size"),
)
"""`auto` takes the first rule that fits; the last one always does."""


def choose_backend(
    requested: str,
    device: torch.device | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    head_size: int = 64,
) -> BackendChoice:
    """The backend for `requested` ("auto" or a name) and the reason.

    Args:
        requested: "auto", or a name from `BACKENDS`.
        device: of the tensors; None for the CPU.
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
        return BackendChoice(rule.backend, f"auto: {rule.reason}")
    for backend in BACKENDS:
        if backend == requested:
            return BackendChoice(backend, "as requested")
    raise ConfigError(f"unknown attention backend {requested!r}: choose auto, {', '.join(BACKENDS)}")
