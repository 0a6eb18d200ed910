"""Claim: how long numba takes to compile what Treering needs on a new installation, function by function."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numba.core import event

from benchmarks.common.progress import OnProgress, silent

NOTE = "each part in a process with an empty cache, under a minute in all; seconds are those of one processor"
TABLES = {
    "parts": ("name", "seconds", "compiling_s", "num_functions"),
    "slowest": ("part", "function", "seconds", "num_types"),
}

Row = dict[str, Any]

_NUM_SHOWN = 20
MOST_S = 3.0
"""Seconds of a processor for a function of one type, without those that it calls; slower ones are failures."""


class Timer(event.Listener):  # type: ignore[misc]
    """Seconds of this process that numba takes for each function, without those that it calls."""

    def __init__(self) -> None:
        """Nothing compiled yet."""
        self.rows: list[Row] = []
        self._open: list[list[float]] = []

    def on_start(self, event: Any) -> None:
        """A function begins: [its start, seconds of the functions that it calls]."""
        self._open.append([time.process_time(), 0.0])

    def on_end(self, event: Any) -> None:
        """A function ends."""
        start, inner = self._open.pop()
        whole = time.process_time() - start
        function = event.data["dispatcher"].py_func
        self.rows.append({"function": f"{function.__module__}.{function.__qualname__}", "seconds": whole - inner})
        if self._open:
            self._open[-1][1] += whole


def forests() -> None:
    """Compile `Forest`, its paths, and why sharing was lost (`treering inspect --why`)."""
    from treering.tree.forest import Forest
    from treering.tree.repeats import explain_losses

    run = list(range(40))
    forest = Forest.from_sequences([[1, 2, *run], [1, 3, *run], [1, 2]])
    forest.paths()
    explain_losses([forest])


def drafts() -> None:
    """Compile the drafter, and its replay of recorded rollouts (`treering inspect --drafts`)."""
    from treering.analysis.recording import sampled_runs
    from treering.analysis.replay import agreement, write_origins
    from treering.history.draft.drafter import Drafter
    from treering.history.store.store import HistoryStore

    Drafter(HistoryStore()).warm_up()
    zero, one, token = np.zeros(1, np.int64), np.arange(2), np.zeros(1, np.int32)
    ends, _ = sampled_runs(np.ones(1, bool), one)
    accepted, leaves = agreement(token, ends, zero, token, one, token - 1)
    write_origins(np.zeros(1, np.int8), zero, one, token - 1, accepted, leaves, zero)


def schedules() -> None:
    """Compile schedules by length and their simulator (`treering simulate`)."""
    from treering.schedule import HistoPipe, simulate, synthetic_trace

    simulate(HistoPipe(), synthetic_trace("lognormal:4.6,0", num_steps=4, num_rollouts=8, seed=0), workers=4)


def engine() -> None:
    """Compile `TorchEngine` on a CPU with weights in float32, with drafts, cuts and penalties."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from treering.engine.protocol import Request, Sampling
    from treering.engine.torch_engine import TorchEngine
    from treering.history.draft.drafter import Drafter
    from treering.history.store.store import HistoryStore

    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    store = HistoryStore()
    store.add("q", [np.arange(1, 30, dtype=np.int32)] * 2, version=0)
    store.publish()
    penalised = Sampling(max_tokens=16, repetition_penalty=1.1, top_k=4)
    requests = [
        Request(prompt_id="q", prompt=np.array([1, 2, 3]), sampling=sampling, sample=sample)
        for sample, sampling in enumerate((Sampling(max_tokens=16, top_k=1), Sampling(max_tokens=16), penalised))
    ]
    list(TorchEngine(LlamaForCausalLM(config).float().eval(), Drafter(store), max_batch=4).generate(requests))


PARTS: Mapping[str, Callable[[], None]] = {
    "forests": forests,
    "drafts": drafts,
    "schedules": schedules,
    "engine": engine,
}


def measure(*, on_progress: OnProgress = silent) -> dict[str, Any]:
    """Compiles each part in a new process with an empty cache, so parts count alone what others need too.

    Failures are the functions that take more than `MOST_S` in every part that compiles them.
    """
    names, found = list(PARTS), []
    for number, name in enumerate(names):
        on_progress(f"compiling {name}", number / len(names))
        found.append(_measure(name))
    slowest = sorted((row for part in found for row in part["functions"]), key=lambda row: -row["seconds"])
    failures = _slow(found)
    notes = [f"too slow to compile: {failure}" for failure in failures]
    return {"parts": found, "slowest": slowest[:_NUM_SHOWN], "failures": failures, "notes": notes}


def _slow(found: list[dict[str, Any]]) -> list[str]:
    fastest: dict[str, float] = {}
    for row in (row for part in found for row in part["functions"]):
        seconds = row["seconds"] / row["num_types"]
        fastest[row["function"]] = min(seconds, fastest.get(row["function"], seconds))
    return [f"{name}: {seconds:.1f} s" for name, seconds in fastest.items() if seconds > MOST_S]


def _measure(name: str) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        environment = os.environ | {"NUMBA_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.compile.bench", name]
        done = subprocess.run(
            command, env=environment, cwd=Path(__file__).parents[2], check=True, stdout=subprocess.PIPE
        )
    part: dict[str, Any] = json.loads(done.stdout)
    return part


def _in_this_process(name: str) -> dict[str, Any]:
    """The part's seconds, imports included, and its functions, those of several types once."""
    timer = Timer()
    with event.install_listener("numba:compile", timer):
        PARTS[name]()
    functions: dict[str, Row] = {}
    for row in timer.rows:
        function = functions.setdefault(row["function"], {**row, "part": name, "seconds": 0.0, "num_types": 0})
        function["seconds"] += row["seconds"]
        function["num_types"] += 1
    slowest_first = sorted(functions.values(), key=lambda row: -row["seconds"])
    compiling_s = sum(row["seconds"] for row in slowest_first)
    counts = {"compiling_s": compiling_s, "num_functions": len(slowest_first)}
    return {"name": name, "seconds": time.process_time(), **counts, "functions": slowest_first}


if __name__ == "__main__":
    print(json.dumps(_in_this_process(sys.argv[1])))
