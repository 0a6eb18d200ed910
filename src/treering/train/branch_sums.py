"""Sum flat entries over their branches, for losses of whole sequences.

F flat entries, one branch after another   B branches
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def branch_sums(values: Float[Tensor, " F"], branch: Int[Tensor, " F"], num_branches: int) -> Float[Tensor, " B"]:
    """The sum of each branch's values, 0 where it has none; differentiable.

    Example: values [1, 2, 5] of branches [0, 0, 2] of 3 are [3, 0, 5].
    """
    return torch.zeros(num_branches, dtype=values.dtype, device=values.device).index_add(0, branch, values)


def branch_sizes(branch: Int[Tensor, " F"], num_branches: int, *, like: Tensor) -> Float[Tensor, " B"]:
    """The number of each branch's entries, in the dtype of `like`.

    Example: branches [0, 0, 2] of 3 have [2, 0, 1] entries.
    """
    return branch_sums(torch.ones(branch.shape, dtype=like.dtype, device=like.device), branch, num_branches)
