"""Command line: run a subcommand, and end the process after errors and signals.

Exit codes: 0 success, 1 a fault that `doctor` lists, 2 bad input, 129, 130 and 143 interrupted by SIGHUP, SIGINT and
SIGTERM. All but 0 and 1 come with one line on stderr.
"""

import os
import sys
import threading
import traceback
from typing import Any

import typer

from treering.cli.commands import app
from treering.cli.ranks import num_started, speaks_of_end
from treering.cli.signals import describe, ended_by_signals, leave, leave_at_once
from treering.cli.user_messages import in_words_of, notes_on_stderr
from treering.errors import Interrupted, TreeringError
from treering.files.writing import FULL

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

# Usage errors derive from click's own class before typer 0.26, and from typer's copy of it since; the name is the same.
_UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main() -> None:
    """Run the command line on `sys.argv` and exit; the `treering` script calls this through `treering.cli.start`."""
    # Torch reads these when it starts its threads. Spinning threads slow down every process on a shared machine, so let
    # them spin only for a few tenths of a millisecond, which suffices for a small model's next product.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    threads = threading.enumerate()
    try:
        with ended_by_signals(speaks_of_end), notes_on_stderr():
            code = _run()
            if sys.stdout is not None:
                sys.stdout.flush()
    except Interrupted as error:
        _print_error(describe(error))
        leave_at_once(128 + error.signal_number)
    except BrokenPipeError:
        # The reader has left, as `head` does.
        leave_at_once(1)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:
            _print_error(
                f"the result cannot be written ({error.strerror}); free space where stdout goes, and run it again"
            )
            leave_at_once(EXIT_BAD_INPUT)
        if num_started() == 1:
            raise
        traceback.print_exc()
        leave_at_once(1)
    if code and num_started() > 1:
        # Tearing down would wait for pending work with the other ranks.
        leave_at_once(code)
    leave(code or 0, threads)


def _run() -> int | None:
    try:
        # Not standalone: typer would print a mistyped option in a box of many lines.
        code: int | None = app(prog_name="treering", standalone_mode=False)
    except TreeringError as error:
        return _refused(in_words_of("".join(sys.argv[1:2]), str(error)))
    except typer.Abort:
        # Outside the main thread typer handles Ctrl-C; newer releases return the code themselves.
        return EXIT_INTERRUPTED
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        command = "treering" if context is None else context.command_path
        return _refused(f"{error.format_message().rstrip('.')}; see {command} --help")
    return code


def _refused(message: str) -> int:
    _print_error(message)
    return EXIT_BAD_INPUT


def _print_error(message: str) -> None:
    if speaks_of_end():
        print(f"treering: {' '.join(message.split())}", file=sys.stderr, flush=True)
