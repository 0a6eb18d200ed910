"""Engine without a model that returns scripted tokens through the engine protocol."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from treering.engine.protocol import (
    Engine,
    EngineStats,
    FinishReason,
    Keeps,
    Request,
    Rollout,
    RolloutKey,
    WhenRunning,
    check_update,
)
from treering.errors import ConfigError, InputError
from treering.types import TokenIds

Script = Callable[[Request], TokenIds | Sequence[int]]
"""Returns a request's next tokens after its `so_far`; called once, when the request starts."""

LOGPROB = -1.0
"""Both log-probabilities of every scripted token."""


class ScriptedEngine(Engine):
    """Engine that samples from a script, one token per running rollout and step.

    A rollout ends at a stop token, at max_tokens, or at the end of its script (finish reason "stop"); an empty script
    gives a rollout of 0 tokens.

    Example: `ScriptedEngine(lambda request: [7, 8, 9])` with max_tokens=2 gives the tokens [7, 8] in two steps, with
    finish reason "length".
    """

    def __init__(self, script: Script, *, max_batch: int = 8, version: int = 0) -> None:
        """Run at most `max_batch` rollouts at a time, starting at policy version `version`."""
        if max_batch < 1:
            raise ConfigError(f"an engine runs at least one rollout at a time, got max_batch={max_batch}; raise it")
        self._script = script
        self._max_batch = max_batch
        self._version = version
        self._stats = EngineStats()
        self._waiting: dict[RolloutKey, Request] = {}
        self._running: dict[RolloutKey, _Row] = {}
        self._finished: dict[RolloutKey, Rollout] = {}

    @property
    def version(self) -> int:
        return self._version

    @property
    def keeps(self) -> Keeps:
        return "tokens"

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running) + len(self._finished)

    def progress(self) -> dict[RolloutKey, int]:
        return {key: row.rollout.num_tokens for key, row in self._running.items()}

    def submit(self, requests: Iterable[Request]) -> None:
        """Refuse stop strings, which need a tokenizer."""
        queued: dict[RolloutKey, Request] = {}
        taken = {*self._waiting, *self._running, *self._finished}
        for request in requests:
            if request.key in queued or request.key in taken:
                raise InputError(
                    f"an engine holds one request of a key at a time, got {request.key} twice; count draws and samples"
                )
            if request.sampling.stop_strings:
                raise InputError(
                    f"stop strings need a tokenizer, and this engine has none, got {request.sampling.stop_strings}; "
                    "use stop_tokens"
                )
            queued[request.key] = request
        self._waiting |= queued

    def step(self) -> list[Rollout]:
        """Advance running rollouts by one token and return the finished ones; [] when idle."""
        while self._waiting and len(self._running) < self._max_batch:
            key, request = next(iter(self._waiting.items()))
            row = _Row(request, deque(self._script(request)), replace(request.unstarted(), reward=None))
            del self._waiting[key]
            self._running[key] = row
            self._count(num_prefilled=row.num_tokens)
        self._advance()
        finished, self._finished = list(self._finished.values()), {}
        return finished

    def peek(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        return [self._running[key].rollout for key in keys if key in self._running]

    def abort(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        aborted = [self._finished.pop(key) for key in keys if key in self._finished]
        aborted += [self._running.pop(key).rollout for key in keys if key in self._running]
        return [*aborted, *(self._waiting.pop(key).unstarted() for key in keys if key in self._waiting)]

    def update_weights(self, version: int, when_running: WhenRunning = "finish") -> None:
        check_update(version, self._version, when_running)
        if version == self._version:
            return
        if when_running == "finish":
            while self._running:
                self._advance()
        elif when_running == "abort":
            self._finished |= {key: row.rollout for key, row in self._running.items()}
            self._running.clear()
        else:
            self._count(num_prefilled=sum(row.num_tokens for row in self._running.values()))
        self._version = version

    def _advance(self) -> None:
        rows = [row for row in self._running.values() if row.finish_reason is None]
        for row in rows:
            row.rollout = _with_token(row.rollout, row.left.popleft(), self._version)
        self._count(num_forwards=int(bool(rows)), num_rows=len(rows), num_sampled=len(rows))
        for key, row in list(self._running.items()):
            if row.finish_reason is not None:
                self._finished[key] = replace(row.rollout, finish_reason=row.finish_reason)
                del self._running[key]

    def _count(self, **more: int) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + num for name, num in more.items()})


@dataclass(slots=True)
class _Row:
    """A running request, the rest of its script, and its rollout so far."""

    request: Request
    left: deque[int]
    rollout: Rollout

    @property
    def num_tokens(self) -> int:
        return self.request.prompt.size + self.rollout.num_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        sampling, rollout = self.request.sampling, self.rollout
        so_far = 0 if self.request.so_far is None else self.request.so_far.num_tokens
        if rollout.num_tokens > so_far and int(rollout.tokens[-1]) in sampling.stop_tokens:
            return "stop"
        if rollout.num_tokens >= sampling.max_tokens:
            return "length"
        return None if self.left else "stop"


def _with_token(rollout: Rollout, token: int, version: int) -> Rollout:
    return replace(
        rollout,
        tokens=np.append(rollout.tokens, np.int32(token)),
        logprobs=np.append(rollout.logprobs, LOGPROB),
        policy_logprobs=np.append(rollout.policy_logprobs, LOGPROB),
        loss_mask=np.append(rollout.loss_mask, True),
        versions=np.append(rollout.versions, np.int32(version)),
    )
