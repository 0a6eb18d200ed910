"""Runs of the command line as forked processes of one that has imported everything, so that each takes a second.

`python -m benchmarks.faults.server` reads a JSON object a line: `{"warm": [ARGUMENTS]}` runs a command in the server
itself, which loads what every command needs; `{"start": [ARGUMENTS], "limit": BYTES}` answers with a process id, and
`{"wait": ID}` with the exit code, stderr, and whether processes are left behind.
"""

import json
import os
import resource
import signal
import sys
import time
import traceback
from contextlib import redirect_stderr, suppress
from io import StringIO
from typing import Any

import torch

from benchmarks.faults.runs import is_left
from treering.cli.main import main as treering

with suppress(ImportError):
    # So that a forked server that trains is there at once.
    import peft  # noqa: F401
    from tinker.proto import tinker_public_pb2  # noqa: F401

_POLL_S = 0.005


class Children:
    """The processes that were started and not yet waited for, and where their stderr arrives."""

    def __init__(self) -> None:
        self._outputs: dict[int, int] = {}

    def start(self, arguments: list[str], limit: int | None) -> int:
        """Forks a process that runs a command with files of limited size; returns its id."""
        # A pipe, because a limit on files would hold for a file too.
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            _become(arguments, write, limit)
        os.close(write)
        os.set_blocking(read, False)
        self._outputs[child] = read
        return child

    def wait(self, child: int) -> dict[str, Any]:
        """Waits for a process, kills what it has left behind, and says how it ended."""
        read, output, status = self._outputs.pop(child), b"", None
        while status is None:
            time.sleep(_POLL_S)
            ended, found = os.waitpid(child, os.WNOHANG)
            status = found if ended else None
            output += _available(read)
        left_behind = is_left(child)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.close(read)
        return {
            "code": os.waitstatus_to_exitcode(status),
            "stderr": output.decode(errors="replace"),
            "is_left": left_behind,
        }


def main() -> None:
    # A forked process has no other threads, and sums come in another order with more.
    torch.set_num_threads(1)
    children = Children()
    answers = os.fdopen(os.dup(1), "w")
    _redirect(1, os.devnull)
    for line in sys.stdin:
        request = json.loads(line)
        if "warm" in request:
            with redirect_stderr(StringIO()):
                answer: Any = _run(request["warm"])
        elif "start" in request:
            answer = children.start(request["start"], request["limit"])
        else:
            answer = children.wait(request["wait"])
        print(json.dumps(answer), file=answers, flush=True)


def _become(arguments: list[str], stderr: int, limit: int | None) -> None:
    """The child: never returns."""
    code = 1
    try:
        os.setsid()
        _redirect(0, os.devnull)
        os.dup2(stderr, 2)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        code = _run(arguments)
    finally:
        sys.stderr.flush()
        os._exit(code)


def _run(arguments: list[str]) -> int:
    """The exit code of a command."""
    sys.argv = ["treering", *arguments]
    try:
        treering()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    return 1


def _redirect(descriptor: int, file: str) -> None:
    opened = os.open(file, os.O_RDWR)
    os.dup2(opened, descriptor)
    os.close(opened)


def _available(read: int) -> bytes:
    found = b""
    with suppress(BlockingIOError):
        while part := os.read(read, 1 << 16):
            found += part
    return found


if __name__ == "__main__":
    main()
