"""A reward's changes to its process do not affect the run, except a real Ctrl-C."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from treering.errors import InputError, Interrupted
from treering.rl.user_code import contained


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


class Private(BaseException):
    """Not an `Exception`, like asyncio's CancelledError."""


def raises(error: BaseException) -> None:
    with contained():
        raise error


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt("mine"), SystemExit(3), SystemExit(), GeneratorExit(), Private("out")], ids=repr
)
def test_what_would_end_the_program_is_an_error_of_the_task(error: BaseException) -> None:
    with pytest.raises(InputError, match=f"must not end the run, got {type(error).__name__}"):
        raises(error)


def let_through() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(60)


def swallow() -> None:
    try:
        let_through()
    except BaseException:
        return


def turn_into_an_error() -> None:
    try:
        let_through()
    except BaseException as error:
        raise ValueError("no number") from error


@pytest.mark.parametrize("code", [let_through, swallow, turn_into_an_error])
def test_ctrl_c_ends_the_run_whatever_the_code_makes_of_it(code: Callable[[], None]) -> None:
    with pytest.raises(KeyboardInterrupt), contained():
        code()


def test_an_interruption_by_the_command_line_passes() -> None:
    with pytest.raises(Interrupted):
        raises(Interrupted(signal.SIGTERM))


def test_code_outside_the_main_thread_is_contained_too() -> None:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            raises(KeyboardInterrupt())
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert isinstance(caught[0], InputError)


def test_the_working_directory_is_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with contained():
        os.chdir("/")
    assert Path.cwd() == tmp_path
    with suppress(ValueError), contained():
        os.chdir("/")
        raise ValueError
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize("ends", [lambda: None, lambda: raises(SystemExit(3)), lambda: raises(ValueError("x"))])
def test_a_forked_copy_ends_with_the_block(ends: Callable[[], None]) -> None:
    reader, writer = os.pipe()
    forks: list[int] = []
    with suppress(InputError, ValueError), contained():
        forks.append(os.fork())
        ends()
    # Both processes would write here.
    os.write(writer, b".")
    os.close(writer)
    assert forks[0] > 0
    assert os.waitstatus_to_exitcode(os.waitpid(forks[0], 0)[1]) == 0
    assert os.read(reader, 9) == b"."
    os.close(reader)
