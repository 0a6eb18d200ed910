"""The teacher-forced replay: a drafter proposes, and what agrees with the recording is accepted.

Sampled tokens are generated step by step. A step accepts the drafted path that equals the recording within the present
sampled run, and emits one token more unless the run ends there. What was given in between is appended for free.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from benchmarks.draft.histories import Plan
from treering.analysis.recording import Recorded
from treering.analysis.replay import Drafted
from treering.arrays import Int32Array, Int64Array

Row = dict[str, Any]
"""A row of a report."""

OnDone = Callable[[float], None]
"""Told the share of a replay that is done."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What all steps of a replay did together; a step is one row's."""

    drafted: Drafted = field(default_factory=Drafted)
    propose_us: list[float] = field(default_factory=list)
    """Microseconds of thread CPU time per row, a value per call."""
    call_rows: list[int] = field(default_factory=list)
    """Rows of each call."""

    def add_time(self, taken_us: float, num_rows: int) -> None:
        """Note the seconds of a call and its number of rows."""
        self.propose_us.append(taken_us / num_rows)
        self.call_rows.append(num_rows)

    def row(self, bytes_per_token: float = 0.0) -> Row:
        """The rates as a report has them; each row of a call has its share of the time, and all rows count alike.

        Args:
            bytes_per_token: of index and drafter, by history token; 0 where there is no history.

        Example: two steps that drafted 4 and 2 tokens, of which 3 and 0 were right, emitted 5 tokens: 2.5 tokens per
        step, 3 drafted per step, precision 0.5.
        """
        sums = self.drafted
        times = np.repeat(self.propose_us, self.call_rows) if self.propose_us else np.zeros(1)
        return {
            "tokens_per_step": sums.num_tokens / max(sums.num_steps, 1),
            "drafted_per_step": sums.num_drafted / max(sums.num_steps, 1),
            "precision": sums.num_accepted / max(sums.num_drafted, 1),
            "us_per_row": float(np.median(times)),
            "us_per_row_p95": float(np.percentile(times, 95)),
            "bytes_per_token": bytes_per_token,
        }


class ChainDrafter(Protocol):
    """A drafter of one row at a time whose drafts are chains."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it keeps of the present history."""

    def start(self, recorded: Recorded, sources: Int64Array) -> None:
        """A new rollout begins, with these rollouts as history."""

    def propose(self, context: Int32Array) -> Int32Array:
        """Drafted tokens after a context, prompt included; possibly none."""

    def observe(self, num_drafted: int, num_accepted: int, is_rejected: bool) -> None:
        """What became of the latest draft; rejected is one whose next token was tried and wrong."""


def replay_chains(recorded: Recorded, plan: Plan, drafter: ChainDrafter, on_done: OnDone) -> Row:
    """Replays one rollout after another."""
    tally = Tally()
    num_bytes = num_tokens = 0
    for number, rollout in enumerate(plan.order.tolist()):
        sources = plan.sources(number)
        drafter.start(recorded, sources)
        num_bytes += drafter.num_bytes
        num_tokens += sum(recorded.response(source).size for source in sources.tolist())
        _replay_chain(recorded, rollout, drafter, tally)
        on_done((number + 1) / plan.order.size)
    return tally.row(num_bytes / num_tokens if num_tokens else 0.0)


def part(on_done: OnDone, before: float, size: float, total: float) -> OnDone:
    """Takes the share of a part that is done, and tells that of the whole.

    Example: half of a part of 2 after 3 of 8 is half of the whole.
    """
    return lambda done: on_done((before + size * done) / total)


def _replay_chain(recorded: Recorded, rollout: int, drafter: ChainDrafter, tally: Tally) -> None:
    begin, end = recorded.offsets[rollout : rollout + 2].tolist()
    position = int(recorded.starts[rollout])
    while position < end:
        since = time.thread_time_ns()
        tokens = drafter.propose(recorded.tokens[begin:position])
        tally.add_time((time.thread_time_ns() - since) / 1e3, 1)
        most = int(recorded.run_ends[position]) - position
        tried = tokens[:most]
        is_wrong = tried != recorded.tokens[position : position + tried.size]
        num_accepted = int(is_wrong.argmax()) if is_wrong.any() else tried.size
        drafter.observe(tokens.size, num_accepted, bool(is_wrong.any()))
        num_emitted = min(num_accepted + 1, most)
        tally.drafted.num_steps += 1
        tally.drafted.num_tokens += num_emitted
        tally.drafted.num_accepted += num_accepted
        tally.drafted.num_drafted += tokens.size
        position = int(recorded.nexts[position + num_emitted]) if position + num_emitted < end else end
