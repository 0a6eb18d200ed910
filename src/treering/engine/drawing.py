"""From logits to the tokens that rollouts gain: drawing and verifying, on CPU in one compiled call, else in torch.

Knows logits, drafts and the columns of the sampled rows. Knows nothing of weights or of what becomes of the tokens.

    W sampled positions   R sampled rows   J most drafts of a row   V vocabulary
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treering.engine.rows import Columns, Work
from treering.engine.sampling import diverged, sample
from treering.engine.sampling_cpu import verify
from treering.types import TokenIds

Int64Array = NDArray[np.int64]


class Drawn(NamedTuple):
    """Tokens of the sampled rows: drafted ones that agreed, and one more; [R, 1 + J], filled up to `num_tokens`."""

    tokens: TokenIds
    logprobs: NDArray[np.float64]
    policy_logprobs: NDArray[np.float64]
    num_tokens: Int64Array  # [R]


def draw(logits: Tensor, work: Work, columns: Columns, drafts: TokenIds, draft_offsets: Int64Array) -> Drawn:
    """The tokens behind the computed ones, for logits [W, V] of `work.wanted`.

    Raises:
        StateError: logits that are no distribution.
    """
    rows = work.rows
    num_drafts = draft_offsets[rows + 1] - draft_offsets[rows]
    shape = (rows.size, 1 + int(num_drafts.max(initial=0)))
    drawn = Drawn(
        tokens=np.zeros(shape, np.int32),
        logprobs=np.zeros(shape),
        policy_logprobs=np.zeros(shape),
        num_tokens=np.zeros(rows.size, np.int64),
    )
    if logits.device.type == "cpu":
        _draw_on_cpu(logits, work, columns, drafts, draft_offsets[rows], num_drafts, drawn)
    else:
        _draw_in_torch(logits, work, columns, drafts, draft_offsets[rows], num_drafts, drawn)
    return drawn


def _draw_on_cpu(
    logits: Tensor,
    work: Work,
    columns: Columns,
    drafts: TokenIds,
    first_draft: Int64Array,
    num_drafts: Int64Array,
    drawn: Drawn,
) -> None:
    rows = work.rows
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    bad = verify(
        wide.numpy(),
        work.first_logits,
        num_drafts,
        drafts,
        first_draft,
        columns.keys[rows],
        columns.num_tokens[rows],
        columns.temperature[rows],
        columns.top_k[rows],
        columns.top_p[rows],
        drawn.tokens,
        drawn.logprobs,
        drawn.policy_logprobs,
        drawn.num_tokens,
    )
    if bad >= 0:
        raise diverged(int(rows[bad]))


def _draw_in_torch(
    logits: Tensor,
    work: Work,
    columns: Columns,
    drafts: TokenIds,
    first_draft: Int64Array,
    num_drafts: Int64Array,
    drawn: Drawn,
) -> None:
    """Draws at every wanted position at one time, and keeps what the drafts agree with."""
    owner = np.repeat(work.rows, 1 + num_drafts)
    depth = np.arange(owner.size) - np.repeat(work.first_logits, 1 + num_drafts)

    def on_device(values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(logits.device)

    sampled = sample(
        logits,
        keys=on_device(columns.keys[owner]),
        positions=on_device(columns.num_tokens[owner] + depth),
        temperature=on_device(columns.temperature[owner]),
        top_k=on_device(columns.top_k[owner]),
        top_p=on_device(columns.top_p[owner]),
    )
    tokens, logprobs, policy = (t.cpu().numpy() for t in (sampled.tokens, sampled.logprobs, sampled.policy_logprobs))
    for index, (first, count) in enumerate(zip(work.first_logits, num_drafts, strict=True)):
        own = slice(first, first + count + 1)
        drafted = drafts[first_draft[index] : first_draft[index] + count]
        disagrees = np.flatnonzero(tokens[own][:count] != drafted)
        drawn.num_tokens[index] = 1 + (disagrees[0] if disagrees.size else count)
        drawn.tokens[index, : count + 1] = tokens[own]
        drawn.logprobs[index, : count + 1] = logprobs[own]
        drawn.policy_logprobs[index, : count + 1] = policy[own]
