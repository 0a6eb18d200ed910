"""Claim: what history drafting itself takes: building indexes, noting tokens, proposing for 64 rows, on two threads.

`python -m benchmarks.draft.speed --out benchmarks/results/draft_speed.json`. The corpus is made here: for each of 8
prompts a random walk over 4,000 places, whose samples part and meet again. 64 rollouts of 4,096 tokens are the history,
64 more are drafted, teacher-forced. Times are of the thread's own CPU, but for two threads, where they are of the wall,
beside what two loops that share nothing gain by a second thread.
"""

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from benchmarks.common.timing import print_report
from treering import Drafter, DraftRows, HistoryStore
from treering.arrays import Int32Array

NUM_PROMPTS, NUM_ROWS, NUM_TOKENS, PROMPT_SIZE, NUM_NODES = 8, 64, 4096, 128, 4000
NUM_WARM = 20
_NUM_ROUNDS = 15
_LOOP = 50_000_000


def walks(draw: int) -> list[Int32Array]:
    """One rollout per row, int32 [4096] each.

    From a place the walk goes to the next one with probability 0.99 (70 % of places), 0.7 (20 %) or 0.4 (10 %), else to
    one of three others.
    """
    rollouts = []
    for row in range(NUM_ROWS):
        graph = np.random.default_rng(row % NUM_PROMPTS)
        tokens = graph.zipf(1.3, NUM_NODES) % 50_000
        keeps = graph.choice([0.99, 0.7, 0.4], NUM_NODES, p=[0.7, 0.2, 0.1])
        others = graph.integers(0, NUM_NODES, (NUM_NODES, 3))
        rng, place, rollout = np.random.default_rng((draw, row)), 0, np.empty(NUM_TOKENS, np.int32)
        for i in range(NUM_TOKENS):
            rollout[i] = tokens[place]
            place = (place + 1) % NUM_NODES if rng.random() < keeps[place] else others[place, rng.integers(3)]
        rollouts.append(rollout)
    return rollouts


def rows_of(rollouts: list[Int32Array]) -> DraftRows:
    """All rows at the beginning of their rollouts; their counts grow in place."""
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
    for _ in range(num_steps):
        seconds, drafts = _timed(lambda: drafter.propose(rows))
        proposing.append(seconds)
        accepted, leaves = np.zeros(NUM_ROWS, np.int64), np.full(NUM_ROWS, -1)
        for b in range(NUM_ROWS):
            accepted[b], leaves[b] = _walk(rows, b, drafts)
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


def _walk(rows: DraftRows, b: int, drafts: Any) -> tuple[int, int]:
    """How many tokens of a row's draft the rollout goes on with, and the number of the last one."""
    begin, end = drafts.offsets[b], drafts.offsets[b + 1]
    leaf, depth, at = -1, 0, rows.num_tokens[b]
    for i in range(end - begin):
        if drafts.parents[begin + i] == leaf and drafts.tokens[begin + i] == rows.tokens[b, at + depth]:
            leaf, depth = i, depth + 1
    return depth, leaf


def append_us(store: HistoryStore, rollouts: list[Int32Array]) -> float:
    """Microseconds to note one token of a running row: looking at rows that grew against rows that did not."""
    rows, drafter = rows_of(rollouts), Drafter(store)
    rows.max_drafts[:] = 0
    grown, same = [], []
    for _ in range(min(40, NUM_TOKENS // 64)):
        rows.num_tokens[:] += 64
        grown.append(_timed(lambda: drafter.propose(rows))[0])
        same.append(_timed(lambda: drafter.propose(rows))[0])
    # Some steps make the room wider and note everything again; the median leaves them out.
    return float(np.median(np.array(grown) - np.array(same)) / (64 * NUM_ROWS) * 1e6)


def two_threads(store: HistoryStore, rollouts: list[Int32Array], num_calls: int = 1200) -> dict[str, float]:
    """Calls per second of two drafters in two threads against those of one, and the same of loops that share nothing.

    The second is what the machine gives just then: processors that are shared or two halves of one give less than 2.
    """

    def propose(drafter: Drafter, rows: DraftRows) -> None:
        for _ in range(num_calls):
            drafter.propose(rows)

    pairs = [(Drafter(store), rows_of(rollouts)) for _ in range(2)]
    for drafter, rows in pairs:
        rows.num_tokens[:] += NUM_TOKENS // 8
        drafter.propose(rows)
    _loop(1)
    drafting, looping = [partial(propose, *pair) for pair in pairs], [partial(_loop, _LOOP)] * 2
    rounds = [(_in_two(drafting), _in_two(looping)) for _ in range(_NUM_ROUNDS)]
    of_drafters, of_loops = np.median(rounds, axis=0).tolist()
    return {"two_threads": of_drafters, "two_threads_of_loops": of_loops}


def _in_two(works: Sequence[Callable[[], object]]) -> float:
    """How much faster two works of one length are in two threads than one after the other."""
    start = time.perf_counter()
    works[0]()
    alone = time.perf_counter() - start
    threads = [threading.Thread(target=work) for work in works]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 2 * alone / (time.perf_counter() - start)


@njit(nogil=True)
def _loop(num: int) -> int:
    mixed = 1
    for i in range(num):
        mixed = mixed * 6364136223846793005 ^ (mixed >> 17) + i
    return mixed


def measure(num_steps: int = 400) -> dict[str, Any]:
    """Every figure of the claim."""
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
        "append_us_per_token": append_us(store, new),
        **two_threads(store, new),
    }


def main() -> None:
    """Measures and writes what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the JSON")
    options = parser.parse_args()
    print_report({"num_rows": NUM_ROWS, **measure()}, options.out)


if __name__ == "__main__":
    main()
