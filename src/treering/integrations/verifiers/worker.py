"""Run episodes of verifiers v1 for a trainer, in a separate interpreter: `python worker.py`. Imports no treering.

Records go over standard input and output, one JSON object per line. Prints of verifiers and environments go to
standard error. When its input ends, the worker stops with everything that it started.

    in:  start {env, settings, max_tasks}, serve {base_url, model, tokenizer, renderer, sampling},
         run {episode, key, salt}, cancel {episode}
    out: tasks {tasks}, refused {error}, result {episode, ok, errors, traces}
"""

import asyncio
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

VERSIONS = ((0, 4),)
"""Supported minor versions."""
_PATIENCE_S = 25.0
_MAX_TEXT = 160
"""Characters of an error, so that the trainer's message around it stays within 300."""

Record = Mapping[str, Any]
Send = Callable[[Record], None]


class RefusedError(Exception):
    """The request cannot be run; the text is for the user."""


def load(start: Record) -> tuple[Any, dict[str, Any]]:
    """Return the environment of a `start` record, and its tasks by key.

    Raises:
        RefusedError: an unsupported verifiers, an unknown taskset, refused settings, or duplicate keys.
    """
    check_version()
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    taskset = start["env"]
    try:
        config = resolve_env_config(with_defaults(start["settings"], taskset))
        env = load_environment(config)
    except ModuleNotFoundError as error:
        # Do not suggest a package to install: anybody may own that name on the package index.
        raise RefusedError(
            f"no taskset {taskset!r} in {sys.executable}: {error.args[0].split('. ')[0]}; install there, from its own "
            "source, the package that you trust to have it, or put its folder on PYTHONPATH"
        ) from error
    check_tools(env)
    return env, tasks_of(env, start.get("max_tasks"))


def check_version() -> None:
    """Raise RefusedError if verifiers is missing or has an unsupported version."""
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise RefusedError(
            f"{sys.executable} has no verifiers; set task.python to an interpreter that has verifiers>=0.4,<0.5"
        ) from None
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) not in VERSIONS:
        raise RefusedError(f"{sys.executable} has verifiers {version}; install verifiers>=0.4,<0.5 there")


def with_defaults(settings: Record, taskset: str) -> dict[str, Any]:
    """Return the settings with the taskset's id, and with agents in local subprocesses unless set otherwise."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import env_config_type

    settings = dict(settings)
    settings["taskset"] = {**settings.get("taskset", {}), "id": taskset}
    for name, field in env_config_type(taskset, settings.get("id") or "").model_fields.items():
        if isinstance(field.default, AgentConfig):
            agent = dict(settings.get(name, {}))
            # The default is a sandbox of a hosting company.
            if "runtime" not in field.default.model_fields_set or "runtime" in agent:
                agent["runtime"] = {"type": "subprocess", **agent.get("runtime", {})}
            settings[name] = agent
    return settings


def check_tools(env: Any) -> None:
    """Refuse tool servers that `python -m MODULE` could not start without PYTHONPATH, in another folder.

    An agent would wait for minutes for each of them.
    """
    task = type(env.taskset).task_type()
    servers = [*env.taskset.toolsets(env.taskset.config), *task.toolsets(env.taskset.config.task)]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    for module in {type(server).__module__ for server in servers}:
        found = subprocess.run(
            [sys.executable, "-c", find, module], env=variables, cwd=tempfile.gettempdir(), stderr=subprocess.DEVNULL
        )
        if found.returncode:
            raise RefusedError(
                f"the tool server in {module} runs as its own program, which cannot import that module: PYTHONPATH "
                f"does not reach it; install its package for {sys.executable}"
            )


def tasks_of(env: Any, max_tasks: int | None) -> dict[str, Any]:
    """Return the first `max_tasks` tasks by key."""
    taskset = env.taskset if max_tasks is None else env.taskset.take(max_tasks)
    if not taskset.bounded:
        raise RefusedError("this taskset is endless; set task.max_prompts to the number of tasks to train on")
    tasks: dict[str, Any] = {}
    for task in taskset:
        if tasks.setdefault(task.key, task) is not task:
            raise RefusedError(f"keys of tasks must be distinct, but two tasks have {task.key!r}; override Task.key")
    return tasks


@dataclass(kw_only=True)
class Served:
    """Model that episodes sample from."""

    model: str
    client: Any
    sampling: Record


def served(record: Record) -> Served:
    """Return the model of a `serve` record."""
    from verifiers.v1 import TrainClientConfig

    client = TrainClientConfig(
        type="train",
        base_url=record["base_url"] + "/v1",
        api_key_var="TREERING_NO_KEY",
        renderer=record["renderer"] or None,
        renderer_model_name=record["tokenizer"],
    )
    return Served(model=record["model"], client=client, sampling=record["sampling"])


async def run_episode(env: Any, task: Any, model: Served, salt: str) -> dict[str, Any]:
    """Run one episode; return its traces and errors."""
    from verifiers.v1 import ModelContext
    from verifiers.v1.types import SamplingConfig

    sampling = SamplingConfig(**model.sampling, cache_salt=salt)
    (slot,) = env.slots(task, 1)
    episode = await env.run_slot(slot, ModelContext(model=model.model, client=model.client, sampling=sampling))
    errors = [failure_text(error.type, error.message) for error in episode.errors]
    for trace in episode.traces:
        if not trace.ok:
            errors += [failure_text(error.type, error.message, agent=trace.agent.name) for error in trace.errors]
    return {
        "ok": episode.ok,
        "errors": errors,
        "traces": [
            {
                "id": trace.id,
                "is_truncated": trace.is_truncated,
                "record": trace.model_dump(mode="json", context={"float_decimals": None}, exclude={"tools"}),
            }
            for trace in episode.traces
        ],
    }


def failure_text(kind: str, message: str, *, agent: str = "") -> str:
    """Return an error of verifiers as one short line: its cause, and a fix if one is known.

    Verifiers quotes the output of a program that failed, so its message may be a long traceback.

    Example: ("HarnessError", "exit 1: Traceback ... KeyError: 1", agent="a") is "agent 'a' failed: KeyError: 1".
    """
    cause = cause_of(message) or f"{kind}: {_one_line(message)}"
    text = f"agent {agent!r} failed: {cause}" if agent else cause
    fix = "; set [task.renderer] name = ..." if "DefaultRenderer" in cause and "tool" in cause else ""
    return _cut(text, _MAX_TEXT - len(fix)) + fix


def cause_of(message: str) -> str:
    """Return the exception that ends the last traceback of a message; empty if it has no traceback."""
    # Lines of exception groups begin with bars.
    lines = [re.sub(r"^ *(\| ?|\+-+$)", "", line) for line in message.splitlines()]
    frames = [i for i, line in enumerate(lines) if re.match(r' +File "', line)]
    rest = lines[frames[-1] + 1 :] if frames else []
    while rest and (not rest[0].strip() or rest[0].startswith(" ")):
        rest.pop(0)
    return _one_line("\n".join(rest))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 3] + "..."


class Worker:
    """Loop that reads records and answers them."""

    def __init__(self, send: Send) -> None:
        """Answer records through `send`."""
        self._send = send
        self._env: Any = None
        self._tasks: dict[str, Any] = {}
        self._model: Served | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._stack = AsyncExitStack()

    async def serve(self, inbox: "asyncio.Queue[Record | None]") -> None:
        """Answer records until the input ends."""
        async with self._stack:
            while (record := await inbox.get()) is not None:
                await self._take(record)
            for running in self._running.values():
                running.cancel()
            if self._running:
                await asyncio.wait(self._running.values(), timeout=_PATIENCE_S)

    async def _take(self, record: Record) -> None:
        match record["type"]:
            case "start":
                await self._start(record)
            case "serve":
                self._model = served(record)
            case "run":
                episode = record["episode"]
                self._running[episode] = asyncio.create_task(self._run(episode, record["key"], record["salt"]))
            case "cancel" if record["episode"] in self._running:
                self._running[record["episode"]].cancel()

    async def _start(self, record: Record) -> None:
        try:
            self._env, self._tasks = load(record)
            await self._stack.enter_async_context(self._env.serving())
        except BaseException as error:
            self._send({"type": "refused", "error": in_words(error)})
            return
        tasks = [{"key": key, "hash": task.hash} for key, task in self._tasks.items()]
        self._send({"type": "tasks", "tasks": tasks})

    async def _run(self, episode: str, key: str, salt: str) -> None:
        try:
            assert self._model is not None
            result = await run_episode(self._env, self._tasks[key], self._model, salt)
        except asyncio.CancelledError:
            result = {"ok": False, "errors": ["CancelledError: the episode was cancelled"], "traces": []}
        except BaseException as error:
            result = {"ok": False, "errors": [in_words(error)], "traces": []}
        del self._running[episode]
        self._send({"type": "result", "episode": episode, **result})


def in_words(error: BaseException) -> str:
    """Return an error as one line, with a fix if a sandbox without a login exited the interpreter."""
    if isinstance(error, RefusedError):
        return str(error)
    if isinstance(error, SystemExit):
        text = _cut(_one_line(str(error)), 60)
        return (
            f"SystemExit: {text or 'no text'}; an environment must not exit. A hosted runtime exits if it has no "
            'login: set runtime.type = "subprocess"'
        )
    return failure_text(type(error).__name__, str(error))


def main() -> None:
    """Answer records until standard input ends."""
    here = os.path.dirname(os.path.abspath(__file__))
    # Files in this folder must not shadow modules of an environment.
    sys.path[:] = [folder for folder in sys.path if folder != here]
    # Keep the two pipes from whatever verifiers starts or prints.
    records, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    lock = threading.Lock()

    def send(record: Record) -> None:
        with lock, suppress(BrokenPipeError):
            # Write NaN rewards too: the reader refuses them, and without an answer the episode would hang.
            answers.write(json.dumps(record).encode() + b"\n")
            answers.flush()

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    inbox: asyncio.Queue[Record | None] = asyncio.Queue()

    def read() -> None:
        for line in records:
            loop.call_soon_threadsafe(inbox.put_nowait, json.loads(line))
        loop.call_soon_threadsafe(inbox.put_nowait, None)
        # Exit even if an environment blocks the loop.
        threading.Timer(_PATIENCE_S + 2.0, end, [1]).start()

    threading.Thread(target=read, daemon=True).start()
    serving = loop.create_task(Worker(send).serve(inbox))
    serving.add_done_callback(lambda _: loop.stop())
    while not serving.done():
        # A task that raises SystemExit also stops the loop; the episode that awaits it gets the error.
        with suppress(SystemExit):
            loop.run_forever()
    end(0)


def end(status: int) -> None:
    """Exit with this process's group."""
    if os.getpgrp() == os.getpid():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
    os._exit(status)


if __name__ == "__main__":
    main()
