"""Claim: the time that history drafting itself takes: building indexes, proposing for 64 rows, learning.

`python -m benchmarks.draft.speed --out benchmarks/results/draft_speed.json`. The corpus is generated: for each of 8
prompts a random walk over 4,000 positions, whose samples part and meet again. 64 rollouts of 4,096 tokens are the
history, 64 more are drafted, teacher-forced. Times are of the thread's own CPU.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.timing import print_report
from treering import Drafter, DraftRows, HistoryStore
from treering.analysis.replay import agreement
from treering.arrays import Int32Array

NUM_PROMPTS, NUM_ROWS, NUM_TOKENS, PROMPT_SIZE, NUM_NODES = 8, 64, 4096, 128, 4000
NUM_WARM = 20


def walks(draw: int) -> list[Int32Array]:
    """One rollout per row, int32 [4096] each.

    From a position the walk goes to the next one with probability 0.99 (70 % of positions), 0.7 (20 %) or 0.4 (10 %),
    else to one of three others.
    """
    rollouts = []
    for row in range(NUM_ROWS):
        graph = np.random.default_rng(row % NUM_PROMPTS)
        tokens = graph.zipf(1.3, NUM_NODES) % 50_000
        keeps = graph.choice([0.99, 0.7, 0.4], NUM_NODES, p=[0.7, 0.2, 0.1])
        others = graph.integers(0, NUM_NODES, (NUM_NODES, 3))
        rng, position, rollout = np.random.default_rng((draw, row)), 0, np.empty(NUM_TOKENS, np.int32)
        for i in range(NUM_TOKENS):
            rollout[i] = tokens[position]
            position = (
                (position + 1) % NUM_NODES if rng.random() < keeps[position] else others[position, rng.integers(3)]
            )
        rollouts.append(rollout)
    return rollouts


def rows_of(rollouts: list[Int32Array]) -> DraftRows:
    """All rows at the start of their rollouts; `num_tokens` grows in position."""
    tokens = np.empty((NUM_ROWS, PROMPT_SIZE + NUM_TOKENS), np.int32)
    prompts = np.random.default_rng(9).integers(0, 50_000, (NUM_PROMPTS, PROMPT_SIZE))
    groups = np.arange(NUM_ROWS) % NUM_PROMPTS
    tokens[:, :PROMPT_SIZE], tokens[:, PROMPT_SIZE:] = prompts[groups], np.stack(rollouts)
    return DraftRows(
        prompt_ids=groups.tolist(),
        groups=groups,
        tokens=tokens,
        num_tokens=np.full(NUM_ROWS, PROMPT_SIZE),
        num_prompt_tokens=np.full(NUM_ROWS, PROMPT_SIZE),
        max_drafts=np.full(NUM_ROWS, 64),
        row_ids=np.arange(NUM_ROWS),
    )


def replay(drafter: Drafter, rows: DraftRows, num_steps: int) -> dict[str, float]:
    """Steps as an engine takes them: propose, verify, observe."""
    proposing, observing, num_accepted, num_drafted = [], [], 0, 0
    # All rows as one recording: where each begins, and where each position's rollout ends.
    flat, width = rows.tokens.reshape(-1), rows.tokens.shape[1]
    starts = np.arange(NUM_ROWS) * width
    ends = np.repeat(starts + width, width)
    for _ in range(num_steps):
        seconds, drafts = _timed(lambda: drafter.propose(rows))
        proposing.append(seconds)
        positions = starts + rows.num_tokens
        accepted, leaves = agreement(flat, ends, positions, drafts.tokens, drafts.offsets, drafts.parents)
        observing.append(_timed(lambda a=accepted, n=leaves: drafter.observe(rows, a, leaves=n))[0])
        num_accepted, num_drafted = num_accepted + int(accepted.sum()), num_drafted + drafts.tokens.size
        rows.num_tokens[:] += accepted + 1
        if rows.num_tokens.max() > PROMPT_SIZE + NUM_TOKENS - 70:
            break
    per_row = 1e6 / NUM_ROWS
    steady = np.array(proposing[NUM_WARM:]) * per_row
    num_rows = NUM_ROWS * len(proposing)
    return {
        "propose_us_per_row_p50": float(np.median(steady)),
        "propose_us_per_row_p95": float(np.percentile(steady, 95)),
        "observe_us_per_row_p50": float(np.median(observing[NUM_WARM:]) * per_row),
        "tokens_per_step": 1 + num_accepted / num_rows,
        "drafted_per_step": num_drafted / num_rows,
    }


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.thread_time()
    result = call()
    return time.thread_time() - start, result


def measure(num_steps: int = 400) -> dict[str, Any]:
    """All figures of the claim."""
    history, new = walks(0), walks(1)
    store = HistoryStore()
    for row, rollout in enumerate(history):
        store.add(row % NUM_PROMPTS, [rollout], version=0)
    warm = HistoryStore()
    warm.add("warm", [history[0][:100]], version=0)
    warm.publish()
    seconds, _ = _timed(store.publish)
    replay(Drafter(store), rows_of(new), 2 * NUM_WARM)
    return {
        "build_tokens_per_s": NUM_ROWS * NUM_TOKENS / seconds,
        "bytes_per_token": store.num_bytes / store.num_tokens,
        **replay(Drafter(store), rows_of(new), num_steps),
    }


def main() -> None:
    """Measures, prints and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the JSON")
    options = parser.parse_args()
    print_report({"num_rows": NUM_ROWS, **measure()}, options.out)


if __name__ == "__main__":
    main()
