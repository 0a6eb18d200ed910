"""Refuses states of a supported model in which some use of it would not be exact."""

from torch import nn

from treering.errors import UnsupportedError
from treering.model.families import ModelParts
from treering.model.wrappers import unwrap
from treering.ranks.units import own_hooks


def check_no_dropout(model: nn.Module) -> None:
    """Refuses active dropout: a shared token would get one mask, its branches trained separately several.

    Raises:
        UnsupportedError: a training-mode dropout with p > 0, named.
    """
    for name, module in model.named_modules():
        if module.training and isinstance(module, nn.Dropout) and module.p > 0:
            raise UnsupportedError(
                f"dropout {name!r} has p={module.p} in training mode: set it to 0 or call model.eval()"
            )
        rate = getattr(module, "attention_dropout", 0.0) if module.training else 0.0
        if isinstance(rate, int | float) and rate > 0:
            raise UnsupportedError(f"{name!r} has attention_dropout={rate} in training mode: set it to 0 in the config")


def check_no_hooks(model: nn.Module) -> None:
    """Refuses forward hooks on the causal LM itself, for a caller that computes log-probs without calling it.

    A hook could change the logits or read them, and nothing tells which without calling it. Where the model's own
    forward runs (`patch`), or its logits are compared (an engine), hooks need no check.

    Raises:
        UnsupportedError: a hook, with the model's class.
    """
    causal_lm = unwrap(model).model
    if {*causal_lm._forward_hooks, *causal_lm._forward_pre_hooks} - own_hooks(causal_lm):
        raise UnsupportedError(
            f"{type(causal_lm).__name__} has a forward hook, which would not run on a forest: remove it, hook its "
            "decoder or its head, or use treering.patch(model), which calls the model itself"
        )


def check_whole(parts: ModelParts, what: str) -> None:
    """Refuses a sharded model where weights are read outside of its forward.

    Args:
        parts: of the model.
        what: begins the message, such as "a teacher".

    Raises:
        UnsupportedError: with how to give it whole.
    """
    if parts.shards is not None:
        raise UnsupportedError(
            f"{what} reads whole weights, and fully_shard has sharded this model: pass a whole copy, such as one that "
            "loads torch's get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
        )
