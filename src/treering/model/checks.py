"""Refuse states of a supported model in which a use of it would not be exact."""

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from treering.errors import InputError, UnsupportedError
from treering.model.tree_model import TreeModel, unwrap
from treering.ranks.setup import is_of_deepspeed
from treering.ranks.units import own_hooks


def check_no_dropout(model: TreeModel) -> None:
    """Refuse active dropout: a shared token would get one mask, but several if its branches were trained separately.

    Batch norms are refused as well, since they average over a batch that counts a shared token once.

    Raises:
        UnsupportedError: a rate above 0 or a batch norm in training mode; names it.
    """
    for name, module in model.model.named_modules():
        if module.training and isinstance(module, _BatchNorm | _InstanceNorm):
            raise UnsupportedError(
                f"{type(module).__name__} {name!r} averages over its batch, and a tree computes a shared token once; "
                "use a norm of single tokens, such as LayerNorm, or put the module in evaluation mode"
            )
        setting, rate = dropout_of(module) if module.training else ("", 0.0)
        if rate > 0:
            raise UnsupportedError(
                f"dropout {name!r} has {setting}={rate} in training mode; set it to 0 in the configuration of "
                "the model or its adapter, or call model.eval()"
            )


def dropout_of(module: nn.Module) -> tuple[str, float]:
    """Return the dropout rate of a module itself, and the attribute that holds it; ("", 0.0) without one.

    Modules of models and adapters hold rates as numbers, or as numbers by adapter name (PEFT's LoHa and LoKr).

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
    """Refuse forward hooks on the input embedding, such as NEFTune's noise, which a shared token would get only once.

    Hooks that treat each token alike are allowed: those of FSDP2 and DeepSpeed, the hook that makes the embedding's
    output require gradients, and the hook by which TRL casts it to the layers' dtype (`cast_lm_head_to_fp32` with tied
    weights).

    Raises:
        UnsupportedError: a hook; names it.
    """
    own = own_hooks(model.embedding)
    for key, hook in model.embedding._forward_hooks.items():
        name = getattr(hook, "__qualname__", type(hook).__name__)
        is_known = name.endswith(("make_inputs_require_grads", "cast_outputs_to_original_dtype"))
        if key not in own and not is_known and not is_of_deepspeed(hook):
            raise UnsupportedError(
                f"the input embedding has the forward hook {name}, which would run once on a shared token, but several "
                "times if its branches were trained separately (NEFTune draws different noise each time); remove the "
                "hook, for NEFTune by not setting neftune_noise_alpha"
            )


def check_no_hooks(model: TreeModel) -> None:
    """Refuse forward hooks on the causal LM itself, for callers that compute log-probs without calling it.

    A hook could change or read the logits, and that is unknown until the model is called. Hooks need no check where the
    model's own forward runs (`patch`), or its logits are compared (an engine).

    Raises:
        UnsupportedError: a hook; names the model's class.
    """
    causal_lm = model.causal_lm
    if {*causal_lm._forward_hooks, *causal_lm._forward_pre_hooks} - own_hooks(causal_lm):
        raise UnsupportedError(
            f"{type(causal_lm).__name__} has a forward hook, which would not run on a forest; remove it, hook its "
            "decoder or its head, or use treering.patch(model), which calls the model itself"
        )


def check_whole(model: TreeModel, what: str) -> None:
    """Refuse a sharded model if weights are read outside its forward.

    Args:
        model: the model.
        what: subject of the message, such as "a teacher".

    Raises:
        UnsupportedError: a sharded model; names how to pass a whole one.
    """
    if model.shards is not None:
        raise UnsupportedError(
            f"{what} needs whole weights, and fully_shard has sharded this model; pass a whole copy, such as one that "
            "loads torch's get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
        )


def max_positions(model: nn.Module) -> int | None:
    """Return the number of positions in a model's configuration (`max_position_embeddings`); None without a limit.

    Example: 32768 for Qwen3-0.6B's original configuration, also inside torch.compile or an adapter.
    """
    _, inner = unwrap(model)
    config: Any = getattr(inner, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None) or None


def check_positions(num_positions: int, limit: int | None, *, what: str, fix: str) -> None:
    """Refuse more positions than a model supports: beyond them it was never trained, and its output is noise.

    Args:
        num_positions: number of positions to compute.
        limit: see `max_positions`.
        what: the input with these positions, for the message.
        fix: what to do about it, for the message.

    Raises:
        InputError: the positions exceed the limit.

    Example: 40 positions are refused with limit 32, and allowed with None.
    """
    if limit is not None and num_positions > limit:
        raise InputError(f"the model has {limit} positions, and {what} goes beyond; {fix}")
