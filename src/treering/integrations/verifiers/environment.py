"""Environments of verifiers v1 as an environment of the loop.

    trainer: engine <- session <- token server (loopback)
                                       ^ calls, with the episode's identity in cache_salt
    worker:  verifiers, its harnesses and tools -> traces, with structure, agents and rewards

What is trained is the log of an episode's calls, and its traces have to agree with it.
"""

import asyncio
import math
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from treering.data.agent_trace import Trace
from treering.data.formats.adapters.verifiers import decode_trace
from treering.engine.protocol import Rollout, Sampling
from treering.errors import InputError, StateError
from treering.extras import require
from treering.integrations.verifiers.process import WorkerProcess, worker_command
from treering.rl.environments.environment import Environment, EnvTask, Outcome
from treering.rl.environments.policy import Call, Policy, Session
from treering.serving.bodies import Asked
from treering.serving.server import Caller, Server, ServerSettings
from treering.types import TokenIds

Ids = tuple[bytes, bytes]
"""The ids of a call: its context, and what was sampled."""


def ids_of(call: Call) -> Ids:
    """The ids of a call of the log."""
    return call.context.tobytes(), call.rollout.tokens.astype(np.int32).tobytes()


def check_calls(trace: Trace, calls: Sequence[Call], name: str) -> None:
    """Compares the messages that a trace says were sampled with the calls that it made.

    Args:
        trace: of a trained agent.
        calls: of the log, those that came with the trace's id.
        name: of the agent, for errors.

    Raises:
        InputError: a sampled message without such a call, or a call without a message.
    """
    said, logged = Counter(sampled_ids(trace)), Counter(map(ids_of, calls))
    strange, lost = (said - logged).total(), (logged - said).total()
    if strange or lost:
        raise InputError(
            f"the trace of agent {name!r} does not match the calls that were answered: {strange} of its "
            f"{said.total()} sampled messages are no call, and {lost} of {logged.total()} calls are no message; ask "
            "the policy by the endpoint alone, and keep its answers as they are"
        )


def sampled_ids(trace: Trace, nodes: Iterable[int] | None = None) -> list[Ids]:
    """What the sampled messages of a trace, or those of the given nodes, were sampled after, and their ids.

    Raises:
        InputError: a sampled message whose ids are not known, or not in one piece.

    Example: nodes with the ids [5, 6] and, sampled, [7, 8] with the mask [False, True] are one call: [5, 6, 7] -> [8].
    """
    paths: dict[int, TokenIds] = {}
    found = []
    wanted = None if nodes is None else set(nodes)
    for i, node in enumerate(trace.nodes):
        before = np.zeros(0, np.int32) if node.parent is None else paths[node.parent]
        paths[i] = np.concatenate([before, node.token_ids]).astype(np.int32)
        if not (node.sampled or node.mask.any()) or (wanted is not None and i not in wanted):
            continue
        own = np.flatnonzero(node.mask)
        if own.size == 0 or own[-1] - own[0] + 1 != own.size:
            raise InputError(f"nodes[{i}] was sampled, and its ids are not known; ask the policy by the endpoint alone")
        start = before.size + int(own[0])
        found.append((paths[i][:start].tobytes(), paths[i][start : start + own.size].tobytes()))
    return found


def untrained_ids(trace: Trace) -> set[Ids]:
    """The calls on no trained path of a trace, such as compactions that were not accepted."""
    kept = {i for path in trace.paths() for i in path}
    return set(sampled_ids(trace, set(range(len(trace.nodes))) - kept))


_SHARED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class EpisodeSampler:
    """A `Sampler` whose callers are episodes by their identity, and traces by their session.

    What a trace asks is logged in the session of its episode under the trace's id. Noise does not depend on that id,
    which is another one in each run.

    Example: the calls of the identity "q1|0|3" are answered by what `add("q1|0|3", session, loop)` has added.
    """

    def __init__(self) -> None:
        """Knows no episode."""
        self._episodes: dict[str, tuple[Session, asyncio.AbstractEventLoop]] = {}

    def add(self, identity: str, session: Session, loop: asyncio.AbstractEventLoop) -> None:
        """Answers an episode's calls from now on, in the event loop of the session."""
        self._episodes[identity] = session, loop

    def remove(self, identity: str) -> None:
        """Refuses an episode's calls from now on."""
        self._episodes.pop(identity, None)

    async def sample(self, context: TokenIds, asked: Asked, caller: Caller) -> list[Rollout]:
        """See `Sampler.sample`.

        Raises:
            StateError: no such episode runs.
            InputError: other sampling parameters than those of the run.
            ContextFullError: the context is too long.
        """
        found = self._episodes.get(caller.identity or "")
        if found is None:
            raise StateError(f"no episode {caller.identity!r} runs here; it has ended, or its calls lost cache_salt")
        session, loop = found
        sampling = _sampling(session, context, asked)
        return [await self._ask(session, loop, caller, context, sampling) for _ in range(asked.num_samples)]

    async def _ask(
        self,
        session: Session,
        loop: asyncio.AbstractEventLoop,
        caller: Caller,
        context: TokenIds,
        sampling: Sampling,
    ) -> Rollout:
        asking = session.ask(caller.session or "", context, sampling, noise="")
        call = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asking, loop))
        return call.rollout


def _sampling(session: Session, context: TokenIds, asked: Asked) -> Sampling:
    own = session.sampling
    other = [name for name in _SHARED if getattr(asked.sampling, name) != getattr(own, name)]
    if other:
        raise InputError(
            f"the policy samples with the run's {other[0]} = {getattr(own, other[0])!r}, and an agent asked for "
            f"{getattr(asked.sampling, other[0])!r}; remove it from the agent's sampling, or set sampling.{other[0]}"
        )
    return own.changed(
        max_tokens=session.limits.turn_tokens(context.size, asked.sampling.max_tokens),
        stop_tokens=tuple(dict.fromkeys([*own.stop_tokens, *asked.sampling.stop_tokens])),
        stop_strings=asked.sampling.stop_strings or own.stop_strings,
    )


MODEL = "policy"
"""The name of the policy, which agents ask for."""
UNTRAINED = "left out"
"""The agent of calls on no trained path: attempts that were repeated, and compactions that were not accepted."""


_START_S = 600.0
"""How long loading may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersSettings:
    """Which environment runs, and where.

    Example: `VerifiersSettings(env="kuhn_poker", tokenizer="models/tiny")`
    """

    env: str
    """Id of a taskset that is installed for `python`."""
    tokenizer: str
    """Folder of the tokenizer that renders chats."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """verifiers' own, of the environment."""
    renderer: Mapping[str, Any] = field(default_factory=dict)
    """verifiers' own, of the renderer; empty: by the model's name."""
    python: str = sys.executable
    """An interpreter that has verifiers."""
    max_tasks: int | None = None
    """Tasks to keep from the start; None: all."""


class VerifiersEnvironment(Environment):
    """Tasks and episodes of a taskset of verifiers.

    Structure, agents and rewards are those of the traces that verifiers returns; ids, log-probs and versions are those
    of the calls that were answered. Where the two differ the episode fails.

    Example:
        >>> settings = VerifiersSettings(env="kuhn_poker", tokenizer="models/tiny")             # doctest: +SKIP
        >>> environment = VerifiersEnvironment(settings)                                        # doctest: +SKIP
    """

    def __init__(self, settings: VerifiersSettings, command: Sequence[str] | None = None) -> None:
        """Starts the worker and reads the tasks.

        Args:
            settings: see there.
            command: starts a worker; None: that of `settings.python`.

        Raises:
            ConfigError: verifiers or the taskset is not there, or it refuses the settings.
            MissingExtraError: aiohttp is not installed here.
        """
        # Before the first episode, which would fail by it.
        require("treering.serving", "aiohttp")
        self._settings = settings
        self._command = list(command or worker_command(settings.python))
        self._sampler = EpisodeSampler()
        self._server: Server | None = None
        self._served: dict[str, Any] = {}
        self._starting = threading.Lock()
        self._worker, tasks = self._start()
        self.tasks = [EnvTask(id=task["key"], data=task["hash"]) for task in tasks]

    async def run(self, task: EnvTask, policy: Policy) -> Outcome:
        """See `Environment.run`.

        Raises:
            StateError: the worker died, or verifiers says that the episode failed.
            InputError: a trace that does not match the log, or has no reward.
        """
        session = policy.session
        identity = f"{task.id}|{session.draw}|{session.sample}"
        self._sampler.add(identity, session, asyncio.get_running_loop())
        try:
            result = await self._answer(task, session, identity)
        finally:
            self._sampler.remove(identity)
        if not result["ok"]:
            raise StateError(f"verifiers: {(result['errors'] or ['the episode is not ok and names no error'])[0]}")
        return outcome_of(session, result["traces"])

    def close(self) -> None:
        """See `Environment.close`."""
        self._worker.close()
        if self._server is not None:
            self._server.close()

    async def _answer(self, task: EnvTask, session: Session, identity: str) -> Mapping[str, Any]:
        """Runs an episode; once more if the worker dies before it has asked anything."""
        for is_last in (False, True):
            worker = await asyncio.to_thread(self._ready, session)
            try:
                running = worker.run(identity, {"key": task.id, "salt": identity})
                return await asyncio.shield(asyncio.wrap_future(running))
            except asyncio.CancelledError:
                worker.cancel(identity)
                with suppress(StateError):
                    await asyncio.wrap_future(running)
                raise
            except StateError:
                if is_last or session.num_asked or worker.is_alive:
                    raise
        raise AssertionError("the last try returns or raises")

    def _start(self) -> tuple[WorkerProcess, list[dict[str, Any]]]:
        worker = WorkerProcess(self._command)
        own = self._settings
        record = {"env": own.env, "settings": dict(own.settings), "max_tasks": own.max_tasks}
        try:
            answer = worker.start(record, time_limit_s=_START_S)
        except BaseException:
            worker.close()
            raise
        return worker, answer["tasks"]

    def _ready(self, session: Session) -> WorkerProcess:
        """The worker, started again if it died, with the server that it asks."""
        with self._starting:
            if self._server is None:
                self._server = Server(
                    self._sampler,
                    model=MODEL,
                    num_positions=session.limits.max_context,
                    settings=ServerSettings(port=0),
                )
                self._served = _serve_record(self._server.url, self._settings, session)
                self._worker.send(self._served)
            if not self._worker.is_alive:
                self._worker.close()
                self._worker, _ = self._start()
                self._worker.send(self._served)
            return self._worker


def outcome_of(session: Session, traces: Sequence[Mapping[str, Any]]) -> Outcome:
    """Gives the calls of a session to the agents of its traces, and returns their rewards.

    The k-th trace of one agent, from the second on, is an agent of its own: "solver", "solver 2".

    Raises:
        InputError: a trace does not match the log, has no reward, or is none.
    """
    runs = [decode_trace(trace["record"]) for trace in traces]
    names = _names(runs)
    calls_of: dict[str, list[Call]] = {trace["id"]: [] for trace in traces}
    for call in session.calls.values():
        calls_of.setdefault(call.agent, []).append(call)
    trained = {name: run for name, run in zip(names, runs, strict=True) if run.is_trainable}
    left_out = set()
    for trace, name in zip(traces, names, strict=True):
        if name in trained:
            check_calls(trained[name], calls_of[trace["id"]], name)
            left_out |= {(trace["id"], ids) for ids in untrained_ids(trained[name])}
    rewards = {name: _reward(run, name) for name, run in trained.items()}
    by_trace = {trace["id"]: name for trace, name in zip(traces, names, strict=True)}

    def agent_of(call: Call) -> str:
        return UNTRAINED if (call.agent, ids_of(call)) in left_out else by_trace.get(call.agent, UNTRAINED)

    session.rename(agent_of, {UNTRAINED: False, **{name: name in trained for name in names}})
    return Outcome(
        reward=sum(rewards.values()) / len(rewards) if rewards else 0.0,
        rewards=rewards,
        numbers={
            "truncated": sum(trace["is_truncated"] for trace in traces) / max(len(traces), 1),
            **_numbers(trained),
        },
    )


def _names(runs: Sequence[Trace]) -> list[str]:
    seen: Counter[str] = Counter()
    names = []
    for run in runs:
        name = str(run.record["agent"]["name"])
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    return names


def _reward(run: Trace, name: str) -> float:
    if run.reward is None:
        raise InputError(
            f"a trained agent has a reward, and {name!r} has none; give it one, in the task's @reward or in the "
            "environment's finalize, or make it not trainable"
        )
    return run.reward


def _numbers(trained: Mapping[str, Trace]) -> dict[str, float]:
    """The metrics and the rewards of traces by name, after the agent's where there are several."""
    numbers = {}
    for agent, run in trained.items():
        scores = {name: reward["score"] for name, reward in run.record.get("rewards", {}).items() if reward}
        for name, value in {**run.record.get("metrics", {}), **scores}.items():
            if value is not None and math.isfinite(value):
                numbers[name if len(trained) == 1 else f"{agent}.{name}"] = float(value)
    return numbers


def _serve_record(url: str, settings: VerifiersSettings, session: Session) -> dict[str, Any]:
    own = session.sampling
    sampling = {"temperature": own.temperature, "top_p": own.top_p, "min_p": own.min_p}
    return {
        "type": "serve",
        "base_url": url,
        "model": MODEL,
        "tokenizer": settings.tokenizer,
        "renderer": dict(settings.renderer),
        "sampling": {**sampling, "top_k": own.top_k or -1, "repetition_penalty": own.repetition_penalty},
    }
