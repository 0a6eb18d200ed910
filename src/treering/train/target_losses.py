"""Losses on the targets of one sequence: sums, as in the documentation of Tinker's protocol.

T positions   K targets of a position
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from treering.errors import InputError, UnsupportedError

Inputs = Mapping[str, Tensor]
"""Inputs of a datum's loss next to its targets, [T] each (`cross_entropy` also [T, K])."""
Numbers = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossKind:
    """Loss: the inputs it needs, its settings with their defaults, and the function that computes it."""

    value: Callable[[Tensor, Inputs, Numbers], Tensor]
    """(log-probs of the targets, inputs, settings) -> a scalar."""
    needs: tuple[str, ...] = ("logprobs", "advantages")
    takes: tuple[str, ...] = ()
    settings: Numbers = field(default_factory=dict)


def _cross_entropy(logprobs: Tensor, inputs: Inputs, _: Numbers) -> Tensor:
    return -(logprobs * inputs["weights"] if "weights" in inputs else logprobs).sum()


def _importance_sampling(logprobs: Tensor, inputs: Inputs, _: Numbers) -> Tensor:
    return -((logprobs - inputs["logprobs"]).exp() * inputs["advantages"]).sum()


def _clipped(ratio: Tensor, inputs: Inputs, settings: Numbers) -> Tensor:
    """Clamp the ratio to its bounds, which a datum may set for each of its tokens."""
    low, high = (
        inputs.get(name, ratio.new_tensor(settings[name])) for name in ("clip_low_threshold", "clip_high_threshold")
    )
    return torch.minimum(torch.maximum(ratio, low), high)


def _surrogate(ratio: Tensor, inputs: Inputs, settings: Numbers) -> Tensor:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, inputs, settings) * advantages).sum()


def _ppo(logprobs: Tensor, inputs: Inputs, settings: Numbers) -> Tensor:
    return _surrogate((logprobs - inputs["logprobs"]).exp(), inputs, settings)


def _cispo(logprobs: Tensor, inputs: Inputs, settings: Numbers) -> Tensor:
    ratio = (logprobs - inputs["logprobs"]).exp().detach()
    return -(_clipped(ratio, inputs, settings) * logprobs * inputs["advantages"]).sum()


def _gspo(logprobs: Tensor, inputs: Inputs, settings: Numbers) -> Tensor:
    """Give each token the ratio of its sequence and the gradient of its own log-prob."""
    inside = inputs["sequence_ratio_mask"] != 0
    if not inside.any():
        raise InputError("sequence_ratio_mask must mark the sampled tokens of each datum, got a mask of zeros only")
    log_ratio = (logprobs.detach() - inputs["logprobs"])[inside].mean()
    return _surrogate((log_ratio + logprobs - logprobs.detach()).exp(), inputs, settings)


def _dro(logprobs: Tensor, inputs: Inputs, settings: Numbers) -> Tensor:
    distance = (logprobs - inputs["logprobs"]) ** 2
    return -(logprobs * inputs["advantages"] - 0.5 * settings["beta"] * distance).sum()


_BOUNDS = ("clip_low_threshold", "clip_high_threshold")
_PPO = MappingProxyType({"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
LOSSES: Mapping[str, LossKind] = MappingProxyType(
    {
        "cross_entropy": LossKind(value=_cross_entropy, needs=(), takes=("weights",)),
        "importance_sampling": LossKind(value=_importance_sampling),
        "ppo": LossKind(value=_ppo, takes=_BOUNDS, settings=_PPO),
        "cispo": LossKind(
            value=_cispo,
            takes=_BOUNDS,
            settings=MappingProxyType({"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
        ),
        # Bounds of the paper (arXiv 2507.18071, section 5.1).
        "gspo": LossKind(
            value=_gspo,
            needs=("logprobs", "advantages", "sequence_ratio_mask"),
            takes=_BOUNDS,
            settings=MappingProxyType({"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}),
        ),
        "dro": LossKind(value=_dro, settings=MappingProxyType({"beta": 0.05})),
    }
)
_INSTEAD = MappingProxyType(
    {
        "stable_reinforce": "has no published definition; set loss_fn=importance_sampling",
        "custom": "runs a graph on the client; call forward_backward_custom(data, FUNCTION) there",
    }
)


def find_loss(name: str, given: Mapping[str, float | str]) -> tuple[LossKind, Numbers]:
    """Return a loss by name, with its settings.

    Raises:
        UnsupportedError: a loss that this server does not compute.
        InputError: a setting that the loss does not have, or whose value is not a number.

    Example: `find_loss("ppo", {"clip_high_threshold": 1.28})[1]` has the bounds 0.8 and 1.28.
    """
    if name not in LOSSES:
        why = _INSTEAD.get(name, f"is none of {', '.join(LOSSES)}; set one of them")
        raise UnsupportedError(f"loss_fn={name!r} {why}")
    loss = LOSSES[name]
    for key, value in given.items():
        if key not in loss.settings or isinstance(value, str):
            known = ", ".join(loss.settings) or "none"
            raise InputError(f"loss_fn_config of {name} takes numbers for {known}, got {key}={value!r}; correct it")
    return loss, {**loss.settings, **{key: float(value) for key, value in given.items()}}
