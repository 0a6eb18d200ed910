"""Run environments of verifiers v1 as an environment of the loop.

    trainer: engine <- session <- token server (loopback)
                                       ^ calls, with the episode's identity in cache_salt
    worker:  verifiers, its harnesses and tools -> traces, with structure, agents and rewards

The log of an episode's calls is what is trained on; the traces must agree with it.
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

from treering.data.agent_trace import AgentTrace
from treering.data.formats.adapters.verifiers import decode_trace
from treering.engine.protocol import Rollout, Sampling
from treering.errors import InputError, StateError
from treering.extras import require
from treering.integrations.verifiers.worker_process import WorkerProcess, worker_command
from treering.rl.environments.environment import Environment, EnvTask, Outcome
from treering.rl.environments.policy_calls import Call, Policy, Session
from treering.serving.bodies import Asked
from treering.serving.server import Caller, Server, ServerSettings
from treering.serving.stream import WatchAnswer
from treering.types import TokenIds

Ids = tuple[bytes, bytes]
"""Token ids of a call as bytes: its context, and the sampled tokens."""


def ids_of(call: Call) -> Ids:
    """Return the ids of a logged call."""
    return call.context.tobytes(), call.rollout.tokens.astype(np.int32).tobytes()


def check_calls(trace: AgentTrace, calls: Sequence[Call], name: str) -> None:
    """Check that the sampled messages of a trace match the calls that were answered.

    Args:
        trace: of a trained agent.
        calls: logged calls that carried the trace's id.
        name: the agent's, for errors.

    Raises:
        InputError: a sampled message without a call, or a call without a message.
    """
    sampled, logged = Counter(sampled_ids(trace)), Counter(map(ids_of, calls))
    strange, lost = (sampled - logged).total(), (logged - sampled).total()
    if strange or lost:
        raise InputError(
            f"the trace of agent {name!r} does not match its answered calls: {strange} of {sampled.total()} sampled "
            f"messages have no call and {lost} of {logged.total()} calls have no message; sample only from the "
            "policy's endpoint and keep its answers unchanged"
        )


def sampled_ids(trace: AgentTrace, nodes: Iterable[int] | None = None) -> list[Ids]:
    """Return the ids of a trace's sampled messages: of all nodes, or of the given ones.

    Raises:
        InputError: the ids of a sampled message are unknown or not contiguous.

    Example: nodes with ids [5, 6] and, sampled, [7, 8] with mask [False, True] are one call: [5, 6, 7] -> [8].
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
            raise InputError(f"nodes[{i}] was sampled but its ids are unknown; sample only from the policy's endpoint")
        start = before.size + int(own[0])
        found.append((paths[i][:start].tobytes(), paths[i][start : start + own.size].tobytes()))
    return found


def untrained_ids(trace: AgentTrace) -> set[Ids]:
    """Return the calls that are on no trained path of a trace, such as rejected compactions."""
    kept = {i for path in trace.paths() for i in path}
    return set(sampled_ids(trace, set(range(len(trace.nodes))) - kept))


_SHARED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class EpisodeSampler:
    """`Sampler` that finds the episode of a call by its identity, and the trace by its session.

    Each call is logged in its episode's session under the trace's id. That id differs between runs, so noise does not
    depend on it.

    Example: after `add("q1|0|3", session, loop)`, calls with the identity "q1|0|3" are answered by that session.
    """

    def __init__(self) -> None:
        self._episodes: dict[str, tuple[Session, asyncio.AbstractEventLoop]] = {}

    def add(self, identity: str, session: Session, loop: asyncio.AbstractEventLoop) -> None:
        """Answer an episode's calls in the event loop of its session, from now on."""
        self._episodes[identity] = session, loop

    def remove(self, identity: str) -> None:
        """Refuse an episode's calls from now on."""
        self._episodes.pop(identity, None)

    async def sample(
        self, context: TokenIds, asked: Asked, caller: Caller, watch: WatchAnswer | None = None
    ) -> list[Rollout]:
        """Sample the answers to a call of an episode; nothing is watched, as an agent's answers come whole.

        Raises:
            StateError: no such episode is running.
            InputError: the sampling parameters differ from the run's.
            ContextFullError: the context is too long.
        """
        found = self._episodes.get(caller.identity or "")
        if found is None:
            raise StateError(f"no episode {caller.identity!r} is running: it ended, or its calls dropped cache_salt")
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
            f"an agent asked for {other[0]} = {getattr(asked.sampling, other[0])!r}, but the policy samples with the "
            f"run's {getattr(own, other[0])!r}; remove it from the agent's sampling, or set sampling.{other[0]}"
        )
    return own.changed(
        max_tokens=session.limits.turn_tokens(context.size, asked.sampling.max_tokens),
        stop_tokens=tuple(dict.fromkeys([*own.stop_tokens, *asked.sampling.stop_tokens])),
        stop_strings=asked.sampling.stop_strings or own.stop_strings,
    )


MODEL = "policy"
"""Model name that agents request."""
UNTRAINED = "left out"
"""Agent of calls on no trained path: retried attempts and rejected compactions."""


_START_S = 600.0
"""Time limit of loading an environment, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersSettings:
    """Choice of an environment, its settings, and the interpreter that runs it.

    Example: `VerifiersSettings(env="kuhn_poker", tokenizer="models/tiny")`
    """

    env: str
    """Id of a taskset installed for `python`."""
    tokenizer: str
    """Folder of the tokenizer that chats are rendered with."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Environment settings, passed on to verifiers."""
    renderer: Mapping[str, Any] = field(default_factory=dict)
    """Renderer settings, passed on to verifiers; empty: chosen by the model's name."""
    python: str = sys.executable
    """Interpreter that has verifiers installed."""
    max_tasks: int | None = None
    """Number of tasks to keep, from the start; None: all."""


class VerifiersEnvironment(Environment):
    """Environment whose tasks and episodes come from a taskset of verifiers.

    Structure, agents and rewards come from the traces that verifiers returns; ids, log-probs and versions come from the
    calls that were answered. If the two disagree, the episode fails.

    Example:
        >>> settings = VerifiersSettings(env="kuhn_poker", tokenizer="models/tiny")             # doctest: +SKIP
        >>> environment = VerifiersEnvironment(settings)                                        # doctest: +SKIP
    """

    def __init__(self, settings: VerifiersSettings, command: Sequence[str] | None = None) -> None:
        """Start the worker and read the tasks.

        Args:
            settings: the environment and its interpreter.
            command: starts a worker; None: `settings.python` does.

        Raises:
            ConfigError: verifiers or the taskset is missing, or refuses the settings.
            MissingExtraError: aiohttp is not installed here.
        """
        # Check now: a missing aiohttp would otherwise fail the first episode.
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
        """Run one episode and return its outcome.

        Raises:
            StateError: the worker died, or verifiers reports that the episode failed.
            InputError: a trace does not match the log, or has no reward.
        """
        session = policy.session
        identity = f"{task.id}|{session.draw}|{session.sample}"
        self._sampler.add(identity, session, asyncio.get_running_loop())
        try:
            result = await self._answer(task, session, identity)
        finally:
            self._sampler.remove(identity)
        if not result["ok"]:
            raise StateError(f"verifiers: {(result['errors'] or ['the episode failed without naming an error'])[0]}")
        return outcome_of(session, result["traces"])

    def close(self) -> None:
        """Stop the worker and the server."""
        self._worker.close()
        if self._server is not None:
            self._server.close()

    async def _answer(self, task: EnvTask, session: Session, identity: str) -> Mapping[str, Any]:
        """Run an episode; try again if the worker dies before it has asked for anything."""
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
        """Return the worker, restarted if it died, after telling it the server's address."""
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
    """Assign a session's calls to the agents of its traces, and return their rewards.

    Later traces of the same agent are numbered: "solver", "solver 2".

    Raises:
        InputError: a trace does not match the log, has no reward, or is malformed.
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


def _names(runs: Sequence[AgentTrace]) -> list[str]:
    seen: Counter[str] = Counter()
    names = []
    for run in runs:
        name = str(run.record["agent"]["name"])
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    return names


def _reward(run: AgentTrace, name: str) -> float:
    if run.reward is None:
        raise InputError(
            f"trained agent {name!r} has no reward; set one in the task's @reward or the environment's finalize, or "
            "make the agent not trainable"
        )
    return run.reward


def _numbers(trained: Mapping[str, AgentTrace]) -> dict[str, float]:
    """Return the metrics and rewards of traces by name, prefixed with the agent's if there are several."""
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
