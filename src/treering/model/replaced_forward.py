"""Replaces a module's forward, and restores it even where another library has wrapped the replacement since."""

from collections.abc import Callable
from functools import wraps
from typing import Any

_MARK = "_treering_patch"


def is_replaced(module: Any) -> bool:
    """Whether `replace_forward` replaced the module's forward, or a wrapper of it, and nothing has restored it."""
    forward = module.forward
    while forward is not None:
        if getattr(forward, _MARK, False):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def replace_forward(module: Any, run: Callable[..., Any]) -> Callable[[], None]:
    """Replaces a module's forward; returns what restores it.

    A library may wrap the replacement, as Accelerate does for autocast: then it stays, and calls the original.

    Args:
        module: whose `forward` is replaced.
        run: gets the original forward, then the arguments of each call.

    Example: with `run = lambda original, x: original(x) + 1` a linear layer's output is one larger.
    """
    original, had_own = module.forward, "forward" in module.__dict__

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(original, *args, **kwargs) if getattr(forward, _MARK) else original(*args, **kwargs)

    setattr(forward, _MARK, True)
    module.forward = forward

    def restore() -> None:
        setattr(forward, _MARK, False)
        if module.__dict__.get("forward") is not forward:
            return
        if had_own:
            module.forward = original
        else:
            del module.forward

    return restore
