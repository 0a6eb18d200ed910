"""Claim: what it takes to propose for 64 rows of recorded rollouts, as an engine calls it: rows come, grow and go.

`python -m benchmarks.draft.speed_recorded FILE... --tokenizer DIR --out benchmarks/results/draft_speed_recorded.json`.
Of each task the last samples, 8 or half of them, run side by side as a group; those before are its history. Where a
rollout has ended, the next one begins in its row. Times are of the thread's own CPU; each row has its share of its
call's.
"""

import argparse
from pathlib import Path

import numpy as np

from benchmarks.common.timing import print_report
from benchmarks.draft.drafters.lanes import Lanes
from benchmarks.draft.drafters.waves import NUM_ROWS
from benchmarks.draft.histories import Plan
from benchmarks.draft.recording import Recording, read_recording
from benchmarks.draft.replay import Tally
from treering import Drafter, HistoryStore

GROUP_SIZE = 8


def split(recording: Recording) -> tuple[HistoryStore, Plan]:
    """A store of the tasks' first samples, and a plan of the last ones, which run: task by task, 8 or half of them."""
    store = HistoryStore()
    stored, running = list[int](), list[int]()
    for task in range(int(recording.tasks.max()) + 1):
        (samples,) = np.nonzero(recording.tasks == task)
        first = samples.size - min(GROUP_SIZE, samples.size // 2)
        store.add(task, [recording.response(rollout) for rollout in samples[:first].tolist()], version=0)
        stored += samples[:first].tolist()
        running += samples[first:].tolist()
    store.publish()
    plan = Plan(
        history="siblings",
        order=np.array(running, np.int64),
        prompts=recording.tasks[running],
        waves=np.zeros(len(running), np.int64),
        pools=(np.array(stored, np.int64),),
        versions=(np.zeros(len(stored), np.int64),),
        owners=recording.tasks,
    )
    return store, plan


def measure(recording: Recording) -> dict[str, float]:
    """A replay of all rollouts that run."""
    store, plan = split(recording)
    tally = Tally()
    lanes = Lanes(recording, plan, range(plan.order.size), NUM_ROWS, groups=plan.prompts)
    lanes.run(Drafter(store), tally, lambda _: None)
    return {"num_rows": max(tally.call_rows), "num_calls": len(tally.call_rows), **tally.row()}


def main() -> None:
    """Measures every file and writes what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="recorded rollouts, JSON Lines, plain or .gz")
    parser.add_argument("--tokenizer", type=Path, help="folder that messages are rendered with")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    options = parser.parse_args()
    recordings = {
        file.name.removesuffix(".gz").removesuffix(".jsonl"): read_recording(file, options.tokenizer)
        for file in options.files
    }
    print_report({"files": {name: measure(recording) for name, recording in recordings.items()}}, options.out)


if __name__ == "__main__":
    main()
