"""Claim: what it takes to propose for 64 rows of recorded rollouts, as an engine calls it: rows come, grow and go.

`python -m benchmarks.draft_speed_recorded FILE... --tokenizer DIR --out benchmarks/results/draft_speed_recorded.json`.
Of each task the last samples, 8 or half of them, run side by side as a group; those before are its history. Where a
rollout has ended, the next one begins in its row. Times are of the thread's own CPU; each step is one figure.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.draft_recording import Int64Array, Recording, read_recording
from benchmarks.draft_replay import agreement, emitted
from benchmarks.timing import cpu_name, versions
from treering import Drafter, DraftRows, HistoryStore

NUM_ROWS, GROUP_SIZE, NUM_WARM, NUM_STEPS = 64, 8, 20, 300


class Running:
    """Rows that go through rollouts side by side; where one has ended, the next one begins under a new id."""

    def __init__(self, recording: Recording, rollouts: Int64Array, num_rows: int) -> None:
        self._recording, self._waiting = recording, rollouts[num_rows:].tolist()
        self._rollouts = rollouts[:num_rows].copy()
        lengths = recording.offsets[rollouts + 1] - recording.offsets[rollouts]
        self._tokens = np.zeros((self._rollouts.size, int(lengths.max())), np.int32)
        self.places = np.empty(self._rollouts.size, np.int64)
        for b, rollout in enumerate(self._rollouts.tolist()):
            self._begin(b, rollout)
        self.rows = self._new_rows()

    def move(self, num_emitted: Int64Array) -> bool:
        """Appends what was emitted and what was given behind it; False where a row ended and none was left to begin."""
        ends = self._recording.offsets[self._rollouts + 1]
        behind = self.places + num_emitted
        going_on = np.minimum(self._recording.nexts[np.minimum(behind, ends - 1)], ends)
        self.places[:] = np.where(behind < ends, going_on, ends)
        ended = np.flatnonzero(self.places == ends).tolist()
        if len(ended) > len(self._waiting):
            return False
        for b in ended:
            self._begin(b, self._waiting.pop(0))
        if ended:
            self.rows = self._new_rows()
        self.rows.num_tokens[:] = self.places - self._recording.offsets[self._rollouts]
        return True

    def _begin(self, b: int, rollout: int) -> None:
        begin, end = self._recording.offsets[rollout : rollout + 2].tolist()
        # The whole rollout at once: what stands behind a row's count is not read.
        self._tokens[b, : end - begin] = self._recording.tokens[begin:end]
        self._rollouts[b], self.places[b] = rollout, self._recording.starts[rollout]

    def _new_rows(self) -> DraftRows:
        tasks, begins = self._recording.tasks[self._rollouts], self._recording.offsets[self._rollouts]
        return DraftRows(
            prompt_ids=tasks.tolist(),
            groups=tasks,
            tokens=self._tokens,
            num_tokens=self.places - begins,
            num_prompt_tokens=self._recording.starts[self._rollouts] - begins,
            max_drafts=np.full(self._rollouts.size, 64),
            row_ids=self._rollouts.copy(),
        )


def split(recording: Recording) -> tuple[HistoryStore, Int64Array]:
    """A store of the tasks' first samples, and the last ones, which run: task by task, 8 samples or half of them."""
    store, running = HistoryStore(), list[int]()
    for task in range(int(recording.tasks.max()) + 1):
        (samples,) = np.nonzero(recording.tasks == task)
        first = samples.size - min(GROUP_SIZE, samples.size // 2)
        store.add(task, [recording.response(rollout) for rollout in samples[:first].tolist()], version=0)
        running += samples[first:].tolist()
    store.publish()
    return store, np.array(running, np.int64)


def measure(recording: Recording, num_steps: int = NUM_STEPS) -> dict[str, float]:
    """Figures of the steps behind the first ones, as long as all rows are busy."""
    store, rollouts = split(recording)
    drafter, running = Drafter(store), Running(recording, rollouts, NUM_ROWS)
    num_rows = running.places.size
    seconds, num_emitted, num_drafted, is_busy = list[float](), 0, 0, True
    while is_busy and len(seconds) < NUM_WARM + num_steps:
        since = time.thread_time()
        drafts = drafter.propose(running.rows)
        seconds.append(time.thread_time() - since)
        accepted, leaves = agreement(recording, running.places, drafts.tokens, drafts.offsets, drafts.parents)
        drafter.observe(running.rows, accepted, leaves=leaves)
        new, _ = emitted(recording, running.places, accepted)
        num_emitted, num_drafted = num_emitted + int(new.sum()), num_drafted + drafts.tokens.size
        is_busy = running.move(new)
    steady = np.array(seconds[NUM_WARM:] or seconds) / num_rows * 1e6
    return {
        "num_rows": num_rows,
        "num_steps": len(seconds),
        "propose_us_per_row_p50": float(np.median(steady)),
        "propose_us_per_row_p95": float(np.percentile(steady, 95)),
        "tokens_per_step": num_emitted / (num_rows * len(seconds)),
        "drafted_per_step": num_drafted / (num_rows * len(seconds)),
    }


def main() -> None:
    """Measures every file and writes what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="recorded rollouts, JSON Lines, plain or .gz")
    parser.add_argument("--tokenizer", type=Path, help="folder that messages are rendered with")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    options = parser.parse_args()
    report: dict[str, Any] = {"machine": cpu_name(), "versions": versions(), "files": {}}
    for file in options.files:
        recording = read_recording(file, options.tokenizer)
        # Once to be warm: the first call compiles or loads, and makes room.
        measure(recording, num_steps=1)
        report["files"][file.name.removesuffix(".gz").removesuffix(".jsonl")] = measure(recording)
    text = json.dumps(report, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
