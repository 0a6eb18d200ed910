"""DPO: learn preferences between two sequences, without a reward model or sampling."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from treering.errors import ConfigError, InputError
from treering.train.entries import split_totals
from treering.train.objective import (
    BranchValues,
    Entries,
    Objective,
    Shared,
    Terms,
    Weighting,
    branch_sizes,
    branch_sums,
)

Pairs = Sequence[tuple[int, int]] | Sequence[Sequence[int]] | NDArray[np.integer] | Tensor
"""(chosen, rejected) indices of branches: forests in order, then sequences."""

PreferenceLoss = Literal["sigmoid", "hinge", "ipo"]
"""Loss of the margin m = beta * (log-ratio of the chosen - log-ratio of the rejected). sigmoid: -log sigmoid(m). hinge:
max(0, 1 - m) (arXiv 2309.06657). ipo: ((m - 1/2) / beta)^2 (arXiv 2310.12036), with summed log-ratios."""


def dpo(
    pairs: Pairs,
    loss_masks: BranchValues | None = None,
    ref_logprobs: BranchValues | None = None,
    beta: float = 0.1,
    *,
    label_smoothing: float = 0.0,
    loss_type: PreferenceLoss = "sigmoid",
    shared: Shared = "sum",
) -> Objective:
    """Build the DPO objective: -log sigmoid(beta * (log-ratio of chosen - of rejected)), averaged over pairs.

    The log-ratio of a branch is the sum of its log-probs over its trained tokens, less the reference's (arXiv
    2305.18290, equation 7). The branches of a pair usually share their prompt; mask it out to keep it out of both sums
    (it cancels in the difference, but not in the metrics). A branch may be in several pairs.

    Args:
        pairs: P pairs of different branch indices, (chosen, rejected).
        loss_masks: K masks with one 0/1 entry per token (a sequence's first entry is ignored); None takes all tokens.
        ref_logprobs: log-probs of a reference model: for each of K branches one number, the *sum* over its trained
            tokens, or a list with one log-prob per token. None is reference-free: 0.
        beta: penalty on distance from the reference; positive.
        label_smoothing: probability, below 0.5, that a label is wrong (conservative DPO); only for "sigmoid".
        loss_type: see `PreferenceLoss`.
        shared: only "sum".

    Raises:
        InputError: invalid pairs; `backward` refuses an index without a branch.
        ConfigError: an invalid option, label smoothing with another loss, or shared="once".

    Example: log-ratios 1.0 (chosen) and -1.0 (rejected) with beta=0.1 give -log sigmoid(0.2) = 0.598.
    """
    _check(beta, label_smoothing, loss_type, shared)

    def terms(entries: Entries) -> Terms:
        assert entries.pairs is not None
        rewards = beta * _log_ratios(entries)
        chosen, rejected = rewards[entries.pairs[:, 0]], rewards[entries.pairs[:, 1]]
        loss = _loss(chosen - rejected, beta=beta, label_smoothing=label_smoothing, loss_type=loss_type)
        return Terms(loss=loss, metrics=_metrics(chosen.detach(), rejected.detach()))

    values: dict[str, BranchValues] = {}
    if ref_logprobs is not None:
        values["ref_logprobs"], values["ref_sums"] = split_totals("ref_logprobs", ref_logprobs)
    return Objective(
        name="dpo",
        weighting=Weighting(normalizer="sum"),
        terms=terms,
        loss_masks=loss_masks,
        values=values,
        scope="pair",
        pairs=_as_pairs(pairs),
    )


def _log_ratios(entries: Entries) -> Float[Tensor, " B"]:
    """Return the log-ratio of each branch; 0 if none of its tokens is trained."""
    if not entries.values:
        return branch_sums(entries.logprobs, entries.branch, entries.num_branches)
    # A branch's sum is repeated at each of its entries, so divide it by their number.
    sizes = branch_sizes(entries.branch, entries.num_branches, like=entries.logprobs)
    reference = entries.values["ref_logprobs"] + entries.values["ref_sums"] / sizes[entries.branch]
    return branch_sums(entries.logprobs - reference, entries.branch, entries.num_branches)


def _loss(
    margin: Float[Tensor, " P"], *, beta: float, label_smoothing: float, loss_type: PreferenceLoss
) -> Float[Tensor, " P"]:
    match loss_type:
        case "sigmoid":
            right, wrong = torch.nn.functional.logsigmoid(margin), torch.nn.functional.logsigmoid(-margin)
            return -(1 - label_smoothing) * right - label_smoothing * wrong
        case "hinge":
            return torch.relu(1 - margin)
        case "ipo":
            return ((margin - 0.5) / beta).square()


def _metrics(chosen: Float[Tensor, " P"], rejected: Float[Tensor, " P"]) -> dict[str, Float[Tensor, " P"]]:
    return {
        "reward_margin": chosen - rejected,
        "accuracy": (chosen > rejected).to(chosen.dtype),
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }


def _as_pairs(pairs: Pairs) -> NDArray[np.int64]:
    try:
        array = np.asarray(pairs)
    except ValueError as error:
        raise InputError(f"pairs must be (chosen, rejected) branch numbers, got a ragged list ({error})") from error
    if array.size == 0:
        return np.zeros((0, 2), np.int64)
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iu":
        raise InputError(
            f"pairs must be a list of (chosen, rejected) branch numbers, got {array.dtype} of shape {array.shape}"
        )
    if array.min() < 0:
        raise InputError(f"branches are numbered from 0, forests in order, then sequences, got {array.min()} in pairs")
    equal = np.flatnonzero(array[:, 0] == array[:, 1])
    if equal.size:
        raise InputError(f"a pair needs two different branches, and pair {equal[0]} holds {array[equal[0], 0]} twice")
    return array.astype(np.int64)


def _check(beta: float, label_smoothing: float, loss_type: PreferenceLoss, shared: Shared) -> None:
    if loss_type not in get_args(PreferenceLoss):
        raise ConfigError(f"loss_type must be one of {', '.join(get_args(PreferenceLoss))}, got {loss_type!r}")
    if not isinstance(beta, int | float) or not 0 < beta < math.inf:
        raise ConfigError(f"beta must be a positive number, got {beta!r}; 0.1 is common")
    if not isinstance(label_smoothing, int | float) or not 0 <= label_smoothing < 0.5:
        raise ConfigError(f"label_smoothing must be a number from 0 to below 0.5, got {label_smoothing!r}")
    if label_smoothing > 0 and loss_type != "sigmoid":
        raise ConfigError(f'label_smoothing applies only to loss_type="sigmoid", got {loss_type!r}; remove it')
    if shared != "sum":
        raise ConfigError(
            f'dpo supports only shared="sum", got shared={shared!r}; it compares whole sequences, so a shared token '
            "has no term of its own to count once"
        )
