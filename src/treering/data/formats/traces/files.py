"""Files of traces, an episode or a trace a record. Errors begin with file and line."""

import json
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from treering.data.formats.containers import read_records
from treering.data.formats.fields import placed
from treering.data.formats.files import write_lines
from treering.data.formats.traces.record import decode_traces, encode_trace
from treering.data.trace import Reason, Trace
from treering.errors import DataWarning, InputError

_DECIMALS = 4
"""Digits of the log-probs and advantages that verifiers writes (`RECORD_FLOAT_DECIMALS`)."""


def read_traces(path: str | os.PathLike[str]) -> list[Trace]:
    """All traces of a `traces.jsonl` of verifiers v1, or another file that `read_records` reads, in file order.

    A line is an episode, whose traces belong together, or one trace. Episodes without traces are left out.

    Raises:
        InputError: a bad line, as "FILE:LINE: rule, value, fix"; a file that is missing, corrupt or without traces.

    Warns:
        DataWarning: paths that are not trained, with their number and why; rounded log-probs.

    Example: `[t for trace in read_traces("traces.jsonl") for t in trace.trajectories()]`.
    """
    file = Path(path)
    lines = []
    for where, record in read_records(file):
        with placed(where):
            lines.append(decode_traces(record))
    traces = [trace for found in lines for trace in found]
    if not traces:
        raise InputError(f"{file}: a file of traces holds at least one trace, got 0 in {len(lines)} lines; check it")
    if num_empty := sum(not found for found in lines):
        warnings.warn(f"{file}: {num_empty} episodes without traces are left out", DataWarning, stacklevel=2)
    tally = TraceTally()
    tally.add(traces)
    for note in tally.notes():
        warnings.warn(f"{file}: {note}", DataWarning, stacklevel=2)
    return traces


def write_traces(path: str | os.PathLike[str], traces: Iterable[Trace]) -> None:
    """Writes a file that `read_traces` and verifiers read; a name that ends in .gz is compressed.

    Traces of one episode become one line. Numbers have all their digits; verifiers itself rounds to four decimals. The
    write is atomic: after an error or a kill the old file is still there.

    Raises:
        InputError: the file cannot be written.

    Example: writing what was read gives the same JSON values.
    """
    episodes: dict[int, list[Trace]] = {}
    for trace in traces:
        episodes.setdefault(id(trace if trace.episode is None else trace.episode), []).append(trace)
    write_lines(Path(path), (_line(runs) for runs in episodes.values()))


class TraceTally:
    """Counts what traces leave out, and says it: paths that are not trained and why, and that log-probs are rounded.

    Example: of two traces with three trained paths and one of a failed run, it says "1 of 4 paths are not trained".
    """

    def __init__(self) -> None:
        self._left_out: Counter[Reason] = Counter()
        self._num_trained = 0
        self._are_rounded = True
        self._any_nonzero = False

    def add(self, traces: Iterable[Trace]) -> None:
        """Counts more traces of the same source."""
        for trace in traces:
            self._left_out += trace.left_out()
            self._num_trained += trace.num_trajectories
            # Every log-prob of a trained path is a multiple of 1e-4, and not all are 0.
            for i in {i for path in trace.paths() for i in path} if self._are_rounded else ():
                logprobs = trace.nodes[i].logprobs
                if logprobs is not None:
                    self._are_rounded &= np.array_equal(np.round(logprobs, _DECIMALS), logprobs)
                    self._any_nonzero |= bool(logprobs.any())

    def notes(self) -> list[str]:
        """A sentence for each thing to say."""
        found = []
        if self._left_out:
            num_left_out = self._left_out.total()
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self._left_out.items()))
            found.append(f"{num_left_out} of {num_left_out + self._num_trained} paths are not trained ({reasons})")
        if self._are_rounded and self._any_nonzero:
            found.append(
                f"log-probs are rounded to {_DECIMALS} decimals, so the ratio of a token is off by up to 5e-5, and a "
                "product of T ratios by T times that; for exact ratios recompute them with treering.forward before "
                "the first update"
            )
        return found


def _line(runs: Sequence[Trace]) -> bytes:
    records = [encode_trace(trace) for trace in runs]
    episode = runs[0].episode
    # Escapes keep what UTF-8 has no form for, as half of a pair that a model cut.
    return json.dumps(records[0] if episode is None else {**episode, "traces": records}).encode() + b"\n"
