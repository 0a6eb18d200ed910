"""A model-free engine for tests: plain Python that returns scripted tokens through the engine protocol."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from treering.engine.protocol import Engine, EngineStats, Keeps, WhenRunning, check_update
from treering.engine.request import Request
from treering.engine.rollout import FinishReason, Rollout, RolloutKey
from treering.errors import ConfigError, InputError
from treering.types import TokenIds

Script = Callable[[Request], TokenIds | Sequence[int]]
"""Returns a request's next tokens, after its `so_far`; called once, when the request starts."""

LOGPROB = -1.0
"""Both log-probabilities of every scripted token."""


class ScriptedEngine(Engine):
    """Rollouts from a script, one token per running rollout and step.

    A rollout ends at a stop token, at max_tokens, or at the end of its script (finish reason "stop"); an empty script
    gives a rollout of 0 tokens.

    Example: `ScriptedEngine(lambda request: [7, 8, 9])` with max_tokens=2 gives the tokens [7, 8] in two steps, with
    finish reason "length".
    """

    def __init__(self, script: Script, *, max_batch: int = 8, version: int = 0) -> None:
        """Runs at most `max_batch` rollouts at a time; `version` is the initial policy version."""
        if max_batch < 1:
            raise ConfigError(f"an engine runs at least one rollout at a time, got max_batch={max_batch}; raise it")
        self._script = script
        self._max_batch = max_batch
        self._version = version
        self._stats = EngineStats()
        self._waiting: dict[RolloutKey, Request] = {}
        self._running: dict[RolloutKey, _RunningRequest] = {}
        self._finished: dict[RolloutKey, Rollout] = {}

    @property
    def version(self) -> int:
        """See `Engine.version`."""
        return self._version

    @property
    def keeps(self) -> Keeps:
        """The tokens: those of the script."""
        return "tokens"

    @property
    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return self._stats

    @property
    def num_unfinished(self) -> int:
        """See `Engine.num_unfinished`."""
        return len(self._waiting) + len(self._running) + len(self._finished)

    def progress(self) -> dict[RolloutKey, int]:
        """See `Engine.progress`."""
        return {key: row.num_generated for key, row in self._running.items()}

    def submit(self, requests: Iterable[Request]) -> None:
        """See `Engine.submit`; stop strings need a tokenizer, and are refused."""
        queued: dict[RolloutKey, Request] = {}
        for request in requests:
            if request.key in queued or any(request.key in group for group in self._by_stage):
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
        """Advances running rollouts by one token and returns the finished ones; [] when idle."""
        self._start()
        self._advance()
        finished, self._finished = list(self._finished.values()), {}
        return finished

    def peek(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """See `Engine.peek`."""
        return [self._running[key].rollout("abort") for key in keys if key in self._running]

    def abort(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """See `Engine.abort`."""
        return [rollout for key in keys if (rollout := self._abort_one(key)) is not None]

    def update_weights(self, version: int, when_running: WhenRunning = "finish") -> None:
        """See `Engine.update_weights`."""
        check_update(version, self._version, when_running)
        if version == self._version:
            return
        if when_running == "finish":
            while self._running:
                self._advance()
        elif when_running == "abort":
            self._finished |= {key: row.rollout("abort") for key, row in self._running.items()}
            self._running.clear()
        else:
            self._count(num_prefilled=sum(row.num_read + row.num_written for row in self._running.values()))
        self._version = version

    @property
    def _by_stage(
        self,
    ) -> tuple[dict[RolloutKey, Request], "dict[RolloutKey, _RunningRequest]", dict[RolloutKey, Rollout]]:
        return self._waiting, self._running, self._finished

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._max_batch:
            key, request = next(iter(self._waiting.items()))
            row = _RunningRequest(request=request, script=np.array(self._script(request), np.int32))
            del self._waiting[key]
            self._running[key] = row
            self._count(num_prefilled=row.num_read)

    def _advance(self) -> None:
        rows = [row for row in self._running.values() if row.finish_reason is None]
        for row in rows:
            row.versions.append(self._version)
        self._count(num_forwards=int(bool(rows)), num_rows=len(rows), num_sampled=len(rows))
        for key, row in list(self._running.items()):
            if row.finish_reason is not None:
                self._finished[key] = row.rollout(row.finish_reason)
                del self._running[key]

    def _abort_one(self, key: RolloutKey) -> Rollout | None:
        if key in self._waiting:
            return _RunningRequest(request=self._waiting.pop(key), script=np.zeros(0, np.int32)).rollout("abort")
        if key in self._running:
            return self._running.pop(key).rollout("abort")
        return self._finished.pop(key, None)

    def _count(self, **more: int) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + num for name, num in more.items()})


@dataclass(slots=True, kw_only=True)
class _RunningRequest:
    """A running request: its script, and the policy version of each token written so far."""

    request: Request
    script: TokenIds
    versions: list[int] = field(default_factory=list)

    @property
    def num_written(self) -> int:
        return len(self.versions)

    @property
    def num_read(self) -> int:
        """Tokens known at the start: the prompt and `so_far`."""
        return self.request.prompt.size + self._so_far.num_tokens

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt."""
        return self._so_far.num_tokens + self.num_written

    @property
    def finish_reason(self) -> FinishReason | None:
        sampling = self.request.sampling
        if self.num_written and int(self.script[self.num_written - 1]) in sampling.stop_tokens:
            return "stop"
        if self.num_generated >= sampling.max_tokens:
            return "length"
        return "stop" if self.num_written == self.script.size else None

    def rollout(self, finish_reason: FinishReason) -> Rollout:
        before, num_new = self._so_far, self.num_written
        logprobs = np.full(num_new, LOGPROB)
        return replace(
            before,
            tokens=np.concatenate([before.tokens, self.script[:num_new]]),
            logprobs=np.concatenate([before.logprobs, logprobs]),
            policy_logprobs=np.concatenate([before.policy_logprobs, logprobs]),
            loss_mask=np.concatenate([before.loss_mask, np.ones(num_new, bool)]),
            versions=np.concatenate([before.versions, np.array(self.versions, np.int32)]),
            finish_reason=finish_reason,
            reward=None,
        )

    @property
    def _so_far(self) -> Rollout:
        return self.request.unstarted()
