"""Seconds of a step with a given number of rows by the tokens of its pass, drafting included.

B rows   J entries from B tokens on
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import Float64Array, Int64Array
from treering.history.budget.costs import VerifyCosts
from treering.history.budget.selection import seconds_of


class StepCosts(NamedTuple):
    """Seconds of the passes of a step with B rows, the prices of its drafted tokens included."""

    sizes: Int64Array  # [J] tokens of the pass, from B on
    seconds: Float64Array  # [J]
    per_token: float  # the least that one token more takes


def step_costs(costs: VerifyCosts, num_rows: int) -> StepCosts:
    """The costs of passes from B tokens on, with the price of each drafted token but without looking for drafts.

    Example: passes of 1 and 8 tokens in 1.0 and 2.4 ms, and a price of 0.1 ms per drafted token, give for two rows
    sizes [2, 8] with 1.2 and 2.4 + 0.6 ms, and 0.3 ms per further token.
    """
    beyond = costs.num_tokens[costs.num_tokens > num_rows]
    sizes = np.concatenate([[num_rows], beyond if beyond.size else [num_rows + 1]]).astype(np.int64)
    passes = np.array([seconds_of(float(size), costs.num_tokens, costs.seconds) for size in sizes])
    seconds = passes + costs.prices.drafted * (sizes - num_rows)
    return StepCosts(sizes, seconds, float((np.diff(seconds) / np.diff(sizes)).min()))
