"""The teacher-forced replay: a drafter proposes, and what agrees with the recording is accepted.

Knows chains and trees of proposed tokens and how they are counted. Knows nothing of how they were found.

Sampled tokens are generated step by step. A step accepts the drafted path that equals the recording within the present
sampled run, and emits one token more unless the run ends there. What was given in between is appended for nothing.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np

from benchmarks.draft.histories import Plan
from benchmarks.draft.recording import Recording
from treering.analysis import replay
from treering.arrays import BoolArray, Int32Array, Int64Array
from treering.history.draft.reliability import ReliabilityBin, calibration_error

OnDone = Callable[[float], None]
"""Told the share of a replay that is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """What a drafter has learnt by the end of a replay.

    Attributes:
        num_bytes: of it, as many however much is stored.
        bins: how often estimates of each size came true.
    """

    num_bytes: int
    bins: tuple[ReliabilityBin, ...]

    def row(self) -> dict[str, Any]:
        """As a report has it; what `reliability` holds is for a table of its own."""
        return {
            "learnt_bytes": self.num_bytes,
            "calibration_error": calibration_error(self.bins),
            "reliability": [asdict(one) for one in self.bins],
        }


@dataclass(slots=True, kw_only=True)
class Tally:
    """What all steps of a replay did together; a step is one row's.

    Example: two steps that drafted 4 and 2 tokens, of which 3 and 0 were right, emitted 5 tokens: 2.5 tokens per step,
    3 drafted per step, precision 0.5.
    """

    num_steps: int = 0
    num_emitted: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    propose_us: list[float] = field(default_factory=list)
    """Microseconds of thread CPU time per row, a value per call."""
    call_rows: list[int] = field(default_factory=list)
    """Rows of each call."""
    bytes_per_token: float = 0.0
    """Of index and drafter, by history token; 0 where there is no history."""
    learnt: Learnt | None = None
    """What is known of its estimates in the end; None where a drafter makes none."""

    def add_time(self, taken_us: float, num_rows: int) -> None:
        """Notes a call that took so long for so many rows."""
        self.propose_us.append(taken_us / num_rows)
        self.call_rows.append(num_rows)

    def row(self) -> dict[str, Any]:
        """The rates as a report has them; each row of a call has its share of the time, and all rows count alike."""
        times = np.repeat(self.propose_us, self.call_rows) if self.propose_us else np.zeros(1)
        return {
            "tokens_per_step": self.num_emitted / max(self.num_steps, 1),
            "drafted_per_step": self.num_drafted / max(self.num_steps, 1),
            "precision": self.num_accepted / max(self.num_drafted, 1),
            "us_per_row": float(np.median(times)),
            "us_per_row_p95": float(np.percentile(times, 95)),
            "bytes_per_token": self.bytes_per_token,
            **({} if self.learnt is None else self.learnt.row()),
        }


class ChainDrafter(Protocol):
    """A drafter of one row at a time whose drafts are chains."""

    @property
    def num_bytes(self) -> int:
        """Of what it keeps of the present history."""

    def start(self, recording: Recording, sources: Int64Array) -> None:
        """A new rollout begins, with these rollouts as history."""

    def propose(self, context: Int32Array) -> Int32Array:
        """Drafted tokens behind a context, prompt included; possibly none."""

    def observe(self, num_drafted: int, num_accepted: int, is_rejected: bool) -> None:
        """What became of the latest draft; rejected is one whose next token was tried and wrong."""


def replay_chains(recording: Recording, plan: Plan, drafter: ChainDrafter, on_done: OnDone) -> Tally:
    """Replays one rollout after another."""
    tally = Tally()
    num_bytes = num_tokens = 0
    for number, rollout in enumerate(plan.order.tolist()):
        sources = plan.sources(number)
        drafter.start(recording, sources)
        num_bytes += drafter.num_bytes
        num_tokens += sum(recording.response(source).size for source in sources.tolist())
        _replay_chain(recording, rollout, drafter, tally)
        on_done((number + 1) / plan.order.size)
    tally.bytes_per_token = num_bytes / num_tokens if num_tokens else 0.0
    return tally


def part(on_done: OnDone, before: float, size: float, total: float) -> OnDone:
    """Takes the share of a part that is done, and tells that of the whole.

    Example: half of a part of 2 behind 3 of 8 is half of the whole.
    """
    return lambda done: on_done((before + size * done) / total)


def agreement(
    recording: Recording, places: Int64Array, tokens: Int32Array, offsets: Int64Array, parents: Int32Array
) -> tuple[Int64Array, Int64Array]:
    """How much of each row's draft the recording confirms.

    Args:
        recording: what was sampled.
        places: int64 [B], where the next token of each row stands in it.
        tokens: int32 [D], drafts of all rows.
        offsets: int64 [B + 1], where each row's begins.
        parents: int32 [D], number within the row's draft of the token before, -1 for none; parents stand first.

    Returns:
        int64 [B] accepted tokens, and int64 [B] the number within the row's draft of the last of them, -1 for none.

    Example: where 7, 8 follow, the draft 7, 9, 8 with parents -1, 0, 0 has two accepted, the last one is number 2.
    """
    accepted, leaves = replay.agreement(recording.tokens, recording.run_ends, places, tokens, offsets, parents)
    return accepted, leaves


def emitted(recording: Recording, places: Int64Array, accepted: Int64Array) -> tuple[Int64Array, BoolArray]:
    """int64 [B] tokens that a step emits, and bool [B] rows whose run ended right behind the accepted ones."""
    left = recording.run_ends[places] - places
    return np.minimum(accepted + 1, left), accepted >= left


def _replay_chain(recording: Recording, rollout: int, drafter: ChainDrafter, tally: Tally) -> None:
    begin, end = recording.offsets[rollout : rollout + 2].tolist()
    place = int(recording.starts[rollout])
    while place < end:
        context = recording.tokens[begin:place]
        since = time.thread_time_ns()
        tokens = drafter.propose(context)
        tally.add_time((time.thread_time_ns() - since) / 1e3, 1)
        at = np.array([place], np.int64)
        accepted, _ = agreement(recording, at, tokens, *_as_chain(tokens))
        num_emitted, has_ended = emitted(recording, at, accepted)
        drafter.observe(tokens.size, int(accepted[0]), bool(accepted[0] < tokens.size and not has_ended[0]))
        add_steps(tally, num_emitted, accepted, tokens.size)
        place = int(recording.nexts[place + num_emitted[0]]) if place + num_emitted[0] < end else end


def add_steps(tally: Tally, num_emitted: Int64Array, accepted: Int64Array, num_drafted: int) -> None:
    """Counts a step of each row."""
    tally.num_steps += num_emitted.size
    tally.num_emitted += int(num_emitted.sum())
    tally.num_accepted += int(accepted.sum())
    tally.num_drafted += num_drafted


def _as_chain(tokens: Int32Array) -> tuple[Int64Array, Int32Array]:
    return np.array([0, tokens.size], np.int64), np.arange(-1, tokens.size - 1, dtype=np.int32)
