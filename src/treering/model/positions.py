"""How many positions a model reads, and the refusal of what goes beyond them."""

from typing import Any

from torch import nn

from treering.errors import InputError
from treering.model.wrappers import unwrap


def max_positions(model: nn.Module) -> int | None:
    """Positions that the model's configuration gives it (`max_position_embeddings`); None without such a limit.

    Example: 32768 for Qwen3-0.6B's original configuration, also inside torch.compile or an adapter.
    """
    _, inner = unwrap(model)
    config: Any = getattr(inner, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None) or None


def check_positions(num_positions: int, limit: int | None, *, what: str, fix: str) -> None:
    """Refuses to compute more positions than a model reads: beyond them it was never trained, and its output is noise.

    Args:
        num_positions: to be computed.
        limit: see `max_positions`.
        what: what has so many positions, for the message.
        fix: what to do about it, for the message.

    Raises:
        InputError: there are more.

    Example: 40 positions with limit 32 are refused, and with None allowed.
    """
    if limit is not None and num_positions > limit:
        raise InputError(f"the model reads {limit} positions, and {what} goes beyond; {fix}")
