"""Flips: how often rounding alone makes a rollout go on with another token, by data type.

Batch size and drafts change the shapes of matrix products, and so the rounding of a token's probabilities. Where the
noise falls within that rounding, another token is drawn, and the rollout continues differently. Every comparison is
with the same requests one at a time.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Literal

import torch

from benchmarks.common.progress import OnProgress
from benchmarks.engine.cases import Policy
from benchmarks.engine.drafting import MEASURED_DRAW, REMEMBERED_DRAW, DraftingSide, remember
from benchmarks.engine.runs import Rollouts, count_differing, first_difference, run_all
from treering.engine.torch_engine import TorchEngine

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
BATCH_SIZE = 16

Change = Literal["batch", "batch and drafts"]


def measure_flips(
    policy: Policy,
    *,
    on_progress: OnProgress,
    dtypes: Sequence[torch.dtype] = DTYPES,
    batch_size: int = BATCH_SIZE,
) -> list[dict[str, Any]]:
    """Two results per data type.

    `num_compared` are tokens up to the first difference of each rollout, that one included: after it contexts differ;
    `flip_rate` are first differences per compared token.
    """
    results = []
    for dtype in dtypes:
        on_progress(f"flips in {_name(dtype)}")
        results += _measure_dtype(replace(policy, model=deepcopy(policy.model).to(dtype)), dtype, batch_size)
    return results


def compare(rollouts: Rollouts, expected: Rollouts) -> tuple[int, int]:
    """Rollouts that differ, and tokens that were compared.

    Example: [5, 6, 7] against [5, 8, 9] is 1 difference in 2 compared tokens; against itself 0 in 3.
    """
    num_compared = 0
    for key, tokens in rollouts.items():
        place = first_difference(tokens, expected[key])
        num_compared += tokens.size if place is None else place + 1
    return count_differing(rollouts, expected), num_compared


def _measure_dtype(policy: Policy, dtype: torch.dtype, batch_size: int) -> list[dict[str, Any]]:
    requests = policy.requests(draw=MEASURED_DRAW)
    batched = TorchEngine(policy.model, max_batch=batch_size)
    history = remember(run_all(batched, policy.requests(draw=REMEMBERED_DRAW)))
    expected = run_all(TorchEngine(policy.model, max_batch=1), requests)
    changed: dict[Change, Rollouts] = {
        "batch": run_all(batched, requests),
        "batch and drafts": DraftingSide(policy, history, batched, num_threads=1).run(requests),
    }
    results = []
    for change, rollouts in changed.items():
        num_differing, num_compared = compare(rollouts, expected)
        results.append(
            {
                "dtype": _name(dtype),
                "backend": batched.backend,
                "change": change,
                "batch_size": batch_size,
                "num_rollouts": len(expected),
                "num_differing": num_differing,
                "differing_share": num_differing / len(expected),
                "num_compared": num_compared,
                "flip_rate": num_differing / num_compared,
            }
        )
    return results


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
