"""The importance ratio of a whole sequence, at each of its tokens, which GSPO and RLOO clip.

F flat entries
"""

from jaxtyping import Float
from torch import Tensor

from treering.train.branch_sums import branch_sizes, branch_sums
from treering.train.objective import Entries


def mean_log_ratio(entries: Entries, old_logprobs: Float[Tensor, " F"]) -> Float[Tensor, " F"]:
    """The mean of log r over each entry's branch, with a gradient of 1 in the entry's own log-prob alone.

    Summed over the T tokens of a sequence with one advantage, that is T times the gradient of the mean; it stays
    correct if advantages differ from token to token.

    Example: log-ratios [0.1, 0.3] of a branch have the value 0.2 at both.
    """
    log_ratio = entries.logprobs - old_logprobs
    sums = branch_sums(log_ratio.detach(), entries.branch, entries.num_branches)
    return (sums[entries.branch] / num_tokens(entries)) + _own(entries)


def summed_log_ratio(entries: Entries, old_logprobs: Float[Tensor, " F"]) -> Float[Tensor, " F"]:
    """The sum of log r over each entry's branch, with gradient T (its trained tokens) in the entry's own log-prob.

    A term of it, divided by T and summed over the tokens, has the value and gradient of the sequence.

    Example: log-ratios [0.1, 0.3] of a branch have the value 0.4 at both.
    """
    log_ratio = entries.logprobs - old_logprobs
    sums = branch_sums(log_ratio.detach(), entries.branch, entries.num_branches)
    return sums[entries.branch] + num_tokens(entries) * _own(entries)


def num_tokens(entries: Entries) -> Float[Tensor, " F"]:
    """The number of trained entries of each entry's branch."""
    return branch_sizes(entries.branch, entries.num_branches, like=entries.logprobs)[entries.branch]


def _own(entries: Entries) -> Float[Tensor, " F"]:
    return entries.logprobs - entries.logprobs.detach()
