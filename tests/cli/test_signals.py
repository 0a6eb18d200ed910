"""How signals end a command, tested with real processes: small programs around a block that the signal interrupts."""

import os
import signal
import subprocess
import sys

import pytest

from tests.cli.runs import take_signals
from tests.killing import ROOT

PROGRAM = """
import os, signal, sys, threading, time
from treering.cli import main, signals
from treering.errors import Interrupted

def command():
{command}

def ready():
    print("ready", flush=True)

main._run = command
main.main()
"""
CLEANS_UP = """
    try:
        ready()
        time.sleep(600)
    finally:
        print("cleaned up", flush=True)
"""
WRAPS = """
    import pydantic

    class Settings(pydantic.BaseModel):
        name: str = "a"

        @pydantic.field_serializer("name")
        def sleep(self, name):
            ready()
            time.sleep(600)

    with signals.advising("the same command goes on"):
        Settings().model_dump()
"""
# Each line is printed inside the block that swallows, so a signal that follows it arrives inside the block.
SWALLOWS = """
    line = "ready"
    while True:
        try:
            print(line, flush=True)
            time.sleep(600)
        except BaseException:
            line = "swallowed"
"""
# ctypes would print and drop an error in the callback, and the caller would get no answer.
CALLED_BACK = """
    import ctypes

    def called_back():
        signal.raise_signal(signal.SIGTERM)
        return sum([1] * 7)

    own = {"__name__": "llvmlite.binding", "signal": signal, "sum": sum}
    called_back = type(called_back)(called_back.__code__, own)
    try:
        print(ctypes.CFUNCTYPE(ctypes.c_int)(called_back)(), flush=True)
        time.sleep(600)
    finally:
        print("cleaned up", flush=True)
"""
FINALISES = """
    class Finalised:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)
            sum([1])

    try:
        Finalised()
        time.sleep(600)
    finally:
        print("cleaned up", flush=True)
"""
SENDS_BOTH = """
    try:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        time.sleep(600)
    finally:
        print("cleaned up", flush=True)
"""
LEAVES_A_THREAD = """
    threading.Thread(target=threading.Event().wait).start()
    ready()
    return 0
"""
FORKS = """
    child = os.fork()
    if child == 0:
        time.sleep(600)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    time.sleep(signals._SAME_S)
    return 0
"""
DEFERS = """
    class Run:
        is_requested = False
        has_unsaved = True

        def request(self, number):
            self.is_requested = self.has_unsaved
            return self.is_requested

    run = Run()
    try:
        with signals.deferred_to(run.request, lambda line: print(line, flush=True)):
            ready()
            while not run.is_requested:
                time.sleep(0.01)
            time.sleep(1)
            print("saved", flush=True)
            raise Interrupted(signal.SIGTERM)
    finally:
        print("cleaned up", flush=True)
"""


def started(command: str, *, before: str = "") -> subprocess.Popen[str]:
    program = before + PROGRAM.format(command=command)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=take_signals,
    )


def ended(process: subprocess.Popen[str], *signals: signal.Signals) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a program that gets signals once it is ready, each after a line."""
    assert process.stdout is not None
    for number in signals:
        assert process.stdout.readline()
        process.send_signal(number)
    out, err = process.communicate(timeout=500)
    return process.returncode, out, err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_command_with_one_line_after_its_cleanup(number: signal.Signals, code: int) -> None:
    done = ended(started(CLEANS_UP), number)
    assert done == (code, "cleaned up\n", f"treering: interrupted by {number.name}; start the same command again\n")


def test_a_library_that_wraps_the_interruption_does_not_hide_it() -> None:
    code, _, err = ended(started(WRAPS), signal.SIGTERM)
    assert (code, err) == (143, "treering: interrupted by SIGTERM; the same command goes on\n")


@pytest.mark.parametrize(("command", "answer"), [(CALLED_BACK, "7\n"), (FINALISES, "")])
def test_a_signal_in_a_callback_of_llvm_or_a_finaliser_is_raised_after_it(command: str, answer: str) -> None:
    code, out, err = ended(started(command))
    assert (code, out) == (143, f"{answer}cleaned up\n")
    assert err == "treering: interrupted by SIGTERM; start the same command again\n"


def test_a_second_signal_ends_a_command_at_once() -> None:
    quick = "import treering.cli.signals as s; s._SAME_S = 0.0\n"
    code, _, err = ended(started(SWALLOWS, before=quick), signal.SIGINT, signal.SIGINT)
    assert (code, err.count("\n")) == (130, 1)


ANNOUNCED = "interrupted by SIGTERM: saving the last whole step (again: end at once)\n"


def test_a_run_that_saves_first_reports_it_and_has_the_time() -> None:
    code, out, err = ended(started(DEFERS), signal.SIGTERM)
    assert (code, out) == (143, f"{ANNOUNCED}saved\ncleaned up\n")
    assert err == "treering: interrupted by SIGTERM; start the same command again\n"


def test_a_second_signal_ends_a_run_that_saves_at_once() -> None:
    # Saving would take longer than the test may. The second signal follows the announcement, so it is another request.
    patient = DEFERS.replace("sleep(1)", "sleep(600)")
    quick = "import treering.cli.signals as s; s._SAME_S = 0.0\n"
    code, out, err = ended(started(patient, before=quick), signal.SIGTERM, signal.SIGINT)
    assert (code, out) == (143, "")
    assert err == "treering: interrupted by SIGTERM; start the same command again\n"


def test_a_run_with_nothing_to_save_ends_as_any_command() -> None:
    saved = DEFERS.replace("has_unsaved = True", "has_unsaved = False")
    assert ended(started(saved), signal.SIGTERM)[:2] == (143, "cleaned up\n")


def test_a_signal_that_was_ignored_from_the_start_stays_ignored() -> None:
    ignored = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    code, out, err = ended(started(SENDS_BOTH, before=ignored))
    assert (code, out) == (143, "cleaned up\n")
    assert "interrupted by SIGTERM" in err


def test_a_thread_that_never_ends_does_not_keep_a_command() -> None:
    assert ended(started(LEAVES_A_THREAD)) == (0, "ready\n", "")


def test_a_forked_process_has_no_part_in_its_parents_signals() -> None:
    assert ended(started(FORKS)) == (0, f"{-signal.SIGTERM}\n", "")


# The signal arrives while the command line is imported.
INTERRUPTED = """
import importlib.abc, signal, sys

class Interrupts(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "treering.cli.main":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from treering.cli.start import main
main()
"""


def test_ctrl_c_while_the_command_line_is_imported_ends_it_without_a_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        preexec_fn=take_signals,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
