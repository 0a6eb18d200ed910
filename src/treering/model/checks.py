"""Refuses states of a supported model in which some use of it would not be exact."""

from typing import Any

from torch import nn

from treering.errors import InputError, UnsupportedError
from treering.model.tree_model import TreeModel, unwrap
from treering.ranks.setup import is_of_deepspeed
from treering.ranks.units import own_hooks


def check_no_dropout(model: TreeModel) -> None:
    """Refuse active dropout: a shared token would get one mask, its branches trained separately several.

    Raises:
        UnsupportedError: a rate above 0 in training mode, named.
    """
    for name, module in model.model.named_modules():
        setting, rate = dropout_of(module) if module.training else ("", 0.0)
        if rate > 0:
            raise UnsupportedError(
                f"dropout {name!r} has {setting}={rate} in training mode: set it to 0 in the configuration of "
                "the model or its adapter, or call model.eval()"
            )


def dropout_of(module: nn.Module) -> tuple[str, float]:
    """Return the rate at which a module itself drops values or whole parts, and the attribute that holds it; ("", 0.0): none.

    Layers of models and adapters hold rates as numbers, or as numbers by the name of an adapter (PEFT's LoHa and LoKr).

    Example:
        >>> dropout_of(nn.Dropout(0.1)), dropout_of(nn.Linear(2, 2))
        (('p', 0.1), ('', 0.0))
    """
    is_dropout = "Dropout" in type(module).__name__
    for name, value in vars(module).items():
        if not ("dropout" in name or (is_dropout and name == "p")):
            continue
        for rate in value.values() if isinstance(value, dict) else (value,):
            if isinstance(rate, int | float) and not isinstance(rate, bool) and rate > 0:
                return name, float(rate)
    return "", 0.0


def check_embedding_hooks(model: TreeModel) -> None:
    """Refuse forward hooks on the input embedding, such as the noise of NEFTune: a shared token would get it once.

    Hooks of FSDP2 and DeepSpeed, the one that makes the embedding's output require gradients, and the one by which TRL
    gives it the dtype of the layers (`cast_lm_head_to_fp32` with tied weights) do the same to each token, and stay.

    Raises:
        UnsupportedError: a hook, by its name.
    """
    own = own_hooks(model.embedding)
    for key, hook in model.embedding._forward_hooks.items():
        name = getattr(hook, "__qualname__", type(hook).__name__)
        is_known = name.endswith(("make_inputs_require_grads", "cast_outputs_to_original_dtype"))
        if key not in own and not is_known and not is_of_deepspeed(hook):
            raise UnsupportedError(
                f"the input embedding has the forward hook {name}, which would run once on a shared token, where its "
                "branches, trained apart, get it several times (NEFTune draws other noise for each): remove the hook, "
                "for NEFTune by leaving out neftune_noise_alpha"
            )


def check_no_hooks(model: TreeModel) -> None:
    """Refuse forward hooks on the causal LM itself, for a caller that computes log-probs without calling it.

    A hook could change the logits or read them, and nothing tells which without calling it. Where the model's own
    forward runs (`patch`), or its logits are compared (an engine), hooks need no check.

    Raises:
        UnsupportedError: a hook, with the model's class.
    """
    causal_lm = model.causal_lm
    if {*causal_lm._forward_hooks, *causal_lm._forward_pre_hooks} - own_hooks(causal_lm):
        raise UnsupportedError(
            f"{type(causal_lm).__name__} has a forward hook, which would not run on a forest: remove it, hook its "
            "decoder or its head, or use treering.patch(model), which calls the model itself"
        )


def check_whole(model: TreeModel, what: str) -> None:
    """Refuse a sharded model where weights are read outside of its forward.

    Args:
        model: the model.
        what: begins the message, such as "a teacher".

    Raises:
        UnsupportedError: with how to give it whole.
    """
    if model.shards is not None:
        raise UnsupportedError(
            f"{what} reads whole weights, and fully_shard has sharded this model: pass a whole copy, such as one that "
            "loads torch's get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
        )


def max_positions(model: nn.Module) -> int | None:
    """Positions that the model's configuration gives it (`max_position_embeddings`); None without such a limit.

    Example: 32768 for Qwen3-0.6B's original configuration, also inside torch.compile or an adapter.
    """
    _, inner = unwrap(model)
    config: Any = getattr(inner, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None) or None


def check_positions(num_positions: int, limit: int | None, *, what: str, fix: str) -> None:
    """Refuse to compute more positions than a model reads: beyond them it was never trained, and its output is noise.

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
