"""The controller's client of the reward worker: queue, time limit, and restart after a crash."""

import time
from collections import Counter, deque
from multiprocessing.connection import Connection

from treering.engine.rollout import RolloutKey
from treering.errors import StateError
from treering.rl.judging import left_out
from treering.runtime.account import Account
from treering.runtime.ipc.messages import Case, Cases, Judged, JudgeSettings
from treering.runtime.ipc.process import ChildProcess, Context
from treering.runtime.ipc.shared_memory import SharedMemory
from treering.runtime.workers.reward_worker import run_reward_worker

MAX_DEATHS_OF_ONE = 3
"""Judges that one rollout may end before it is left out."""


class RewardClient:
    """One judge, which has cases only when it has ended those before: nothing is ever sent to one that does not listen.

    Example: a case that takes longer than the limit costs its rollout the reward, and a new judge takes those behind.
    """

    def __init__(
        self,
        settings: JudgeSettings,
        memory: SharedMemory,
        context: Context,
        *,
        time_limit_s: float,
        account: Account,
    ) -> None:
        """Starts the judge; `time_limit_s` is for one case."""
        self._settings = settings
        self._time_limit_s = time_limit_s
        self._account = account
        self._waiting: deque[Case] = deque()
        self._given: deque[Case] = deque()
        self._deaths: Counter[RolloutKey] = Counter()
        self._since_s = time.perf_counter()
        self.seat = ChildProcess("judge", run_reward_worker, memory, context)
        self.seat.fill(settings)

    def connections(self) -> list[Connection]:
        """What to wait for."""
        return [self.seat.connection]

    def add(self, case: Case) -> None:
        """Takes a case."""
        self._waiting.append(case)

    def dispatch(self) -> None:
        """Gives an idle judge all that waits."""
        if self._given or not self._waiting:
            return
        self._given, self._waiting = self._waiting, deque()
        self._since_s = time.perf_counter()
        self.seat.send(Cases(cases=list(self._given)))

    def seconds_left(self) -> float | None:
        """Until the present case has had its time; None where there is none."""
        if not self._given or not self.seat.is_ready:
            return None
        return max(0.0, self._since_s + self._time_limit_s - time.perf_counter())

    def receive(self) -> list[Judged]:
        """Verdicts that have come, those on rollouts that are given up included; a judge that has died is replaced.

        Raises:
            StateError: judges die again and again, whatever they judge.
            Exception: the error that ended the judge.
        """
        was_ready = self.seat.is_ready
        found, has_died = self.seat.receive()
        for judged in found:
            assert judged.key == self._given[0].rollout.key, "cases are judged in their order"
            self._given.popleft()
        if found or self.seat.is_ready != was_ready:
            self._since_s = time.perf_counter()
        if found:
            self.seat.note_progress()
        if has_died:
            found += self._replace()
        return found

    def check_time(self) -> list[Judged]:
        """Ends a judge whose case has had its time; the verdict on that case, if there is one."""
        if self.seconds_left() != 0.0:
            return []
        error = TimeoutError(
            f"a reward may take runtime.reward_time_limit_s = {self._time_limit_s:g} s, and this one took longer; "
            "raise the limit, or speed the reward up"
        )
        self._account.judges_stopped += 1
        self.seat.empty()
        verdict = self._give_up(error)
        self._restart()
        return [verdict]

    def close(self) -> None:
        """Ends the judge."""
        self.seat.empty()

    def _replace(self) -> list[Judged]:
        was_ready = self.seat.is_ready
        self._account.judge_deaths += 1
        self.seat.bury()
        found = []
        # One that died before it listened died of nothing that it was given.
        if self._given and was_ready:
            found = self._blame(self._given[0])
        self._restart()
        return found

    def _blame(self, case: Case) -> list[Judged]:
        self._deaths[case.rollout.key] += 1
        if self._deaths[case.rollout.key] < MAX_DEATHS_OF_ONE:
            return []
        self.seat.note_progress()
        return [self._give_up(StateError(f"its reward ended the judge's process {MAX_DEATHS_OF_ONE} times"))]

    def _give_up(self, error: Exception) -> Judged:
        rollout = self._given.popleft().rollout
        return Judged(key=rollout.key, verdict=left_out(rollout, error))

    def _restart(self) -> None:
        self._account.judged_again += len(self._given)
        self._waiting.extendleft(reversed(self._given))
        self._given.clear()
        self.seat.fill(self._settings)
