"""Supervised fine-tuning: the negative log-prob of each trained token."""

from treering.train.objective import BranchValues, Entries, Normalizer, Objective, Shared, Terms, Weighting


def sft(
    loss_masks: BranchValues | None = None,
    normalizer: Normalizer = "token_mean",
    shared: Shared = "sum",
    *,
    divisor: float | None = None,
) -> Objective:
    """Build the objective of supervised fine-tuning: the negative log-prob of each trained token.

    Args:
        loss_masks: K masks with one 0/1 entry per token (a sequence's first entry is ignored); None trains all tokens.
        normalizer: token_mean, sequence_mean, sequence_sum, tree_mean, constant (with `divisor`) or sum; see
            `Weighting`.
        shared: "sum" equals training every branch separately; "once" counts shared tokens once.
        divisor: for normalizer="constant".

    Example: branches [5, 6] and [5, 7] with log-probs -1 and -3 at their second tokens give the loss
    (1 + 3) / 2 = 2.0.
    """
    weighting = Weighting(normalizer=normalizer, shared=shared, divisor=divisor)
    return Objective(name="sft", weighting=weighting, terms=_terms, loss_masks=loss_masks)


def _terms(entries: Entries) -> Terms:
    return Terms(loss=-entries.logprobs, metrics={})
