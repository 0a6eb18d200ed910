"""How often one of k samples passes, from n samples of which c have passed."""

from collections.abc import Sequence
from math import comb

from treering.errors import InputError


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The unbiased estimate 1 - C(n-c, k) / C(n, k) of the chance that one of k samples passes.

    It is the share of the subsets of k samples that hold one that has passed.

    Raises:
        InputError: k above the number of samples, or counts that contradict each other.

    Example:
        >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
        (0.25, 0.5, 1.0)
    """
    if not 1 <= k <= num_samples or not 0 <= num_passed <= num_samples:
        raise InputError(
            f"k and the samples that passed are among all samples, got k={k} and {num_passed} of {num_samples}; take "
            "more samples, or a smaller k"
        )
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def mean_pass_at_k(num_samples: int, num_passed: Sequence[int]) -> dict[int, float]:
    """The mean over prompts by k, for the powers of two up to the number of samples.

    Args:
        num_samples: of each prompt.
        num_passed: how many of them passed, by prompt; at least one prompt.

    Example:
        >>> mean_pass_at_k(4, [1, 0])
        {1: 0.125, 2: 0.25, 4: 0.5}
    """
    powers = [1 << bits for bits in range(num_samples.bit_length())]
    return {k: sum(pass_at_k(num_samples, c, k) for c in num_passed) / len(num_passed) for k in powers}
