"""What a step gives to the running rollouts: tokens that were drawn, up to the first stop or the limit.

Knows the columns and what was drawn for them. Knows nothing of drawing or of what becomes of finished rollouts.

    B running rows   R sampled rows   J most drafts of a row   K slots that move
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from treering.engine.rows import Columns, Work

Int64Array = NDArray[np.int64]

NOT_FINISHED, STOPPED, OUT_OF_ROOM = 0, 1, 2


class Gains(NamedTuple):
    """What a step gave to R sampled rows, in the order of `Work.rows`, what it tells of all B, and what it moves."""

    num_new: Int64Array  # [R] tokens that the rollout gained
    finish: Int64Array  # [R] NOT_FINISHED, STOPPED or OUT_OF_ROOM
    num_accepted: Int64Array  # [B] of the tokens gained, drafted ones
    leaves: Int64Array  # [B] the last accepted draft's number within its row, -1 for none
    sources: Int64Array  # [K] slots of accepted drafts that do not lie behind one another, as `Decoder.move` takes them
    targets: Int64Array  # [K] where their keys and values belong


@njit(cache=True, nogil=True)
def take_gains(
    columns: Columns,
    work: Work,
    version: int,
    tokens: NDArray[np.int32],
    logprobs: NDArray[np.float64],
    policy_logprobs: NDArray[np.float64],
    num_out: Int64Array,
    path: NDArray[np.int32],
) -> Gains:
    """Appends what was sampled, [R, 1 + J] for the R sampled rows, up to the first stop token or the limit.

    Every sampled token but the last has been computed as a draft, number path[r, i] of its row, so only the last one is
    missing in the arena. A row that goes on wants its accepted drafts behind one another, and few of them move: a
    draft's likeliest path stands first.
    """
    num_sampled, num_rows = work.rows.size, work.num_fed.size
    num_new, finish = np.zeros(num_sampled, np.int64), np.zeros(num_sampled, np.int64)
    num_accepted, leaves = np.zeros(num_rows, np.int64), np.full(num_rows, -1, np.int64)
    sources, targets = np.empty(path.size, np.int64), np.empty(path.size, np.int64)
    num_moves = 0
    for row in range(num_rows):
        columns.num_computed[row] += work.num_fed[row]
    for index in range(num_sampled):
        row = work.rows[index]
        first_draft = columns.own_start[row] + columns.num_tokens[row] - columns.num_prefix[row]
        while num_new[index] < num_out[index] and finish[index] == NOT_FINISHED:
            token = tokens[index, num_new[index]]
            at = columns.num_tokens[row]
            column = at - columns.num_prompt[row]
            columns.tokens[row, at] = token
            columns.logprobs[row, column] = logprobs[index, num_new[index]]
            columns.policy_logprobs[row, column] = policy_logprobs[index, num_new[index]]
            columns.versions[row, column] = version
            columns.was_sampled[row, column] = True
            columns.num_tokens[row] += 1
            num_new[index] += 1
            if columns.num_tokens[row] >= columns.limit[row]:
                finish[index] = OUT_OF_ROOM
            for stop in columns.stop_tokens[row]:
                if stop == token:
                    finish[index] = STOPPED
        columns.num_computed[row] = columns.num_tokens[row] - 1
        num_accepted[row] = min(num_new[index], num_out[index] - 1)
        if num_accepted[row] > 0:
            leaves[row] = path[index, num_accepted[row] - 1]
        for step in range(num_accepted[row] if finish[index] == NOT_FINISHED else 0):
            if path[index, step] != step:
                sources[num_moves], targets[num_moves] = first_draft + path[index, step], first_draft + step
                num_moves += 1
    return Gains(num_new, finish, num_accepted, leaves, sources[:num_moves], targets[:num_moves])


def counts_of(work: Work, gains: Gains, num_drafted: int, num_prefilled: int) -> dict[str, int]:
    """What a step adds to `EngineStats`, by its names; `num_prefilled` counts the pieces of shared prompts."""
    return {
        "num_forwards": 1,
        "num_rows": work.rows.size,
        "num_sampled": int(gains.num_new.sum()),
        "num_prefilled": num_prefilled + int(work.num_fed.sum()) - work.rows.size,
        "num_drafted": num_drafted,
        "num_accepted": int(gains.num_accepted.sum()),
    }
