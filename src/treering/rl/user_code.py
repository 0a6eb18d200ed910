"""Run a task's rewards so that they cannot end the run, fork it, or change its working directory.

Errors in that code are reported with their file and line.
"""

import importlib
import importlib.util
import inspect
import os
import select
import signal
import sys
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from types import FrameType, ModuleType

from treering.errors import ConfigError, InputError, Interrupted, TreeringError

_OTHERS = (
    "<",
    f"{Path(__file__).parents[1]}{os.sep}",
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
"""Prefixes of files that are not the user's code."""

_MAX_ANSWER_BYTES = 4096
"""A pipe holds at least this many bytes without a reader."""


@contextmanager
def contained() -> Iterator[None]:
    """Run a block of user code.

    An exception that would end the program, such as `SystemExit` or a `KeyboardInterrupt` raised by the code itself,
    becomes an InputError. A real Ctrl-C stays one, even if the code swallows it. A process forked by the code exits at
    the end of the block, and the working directory is restored.

    Raises:
        InputError: the code raised an exception that is not an `Exception`.
        KeyboardInterrupt, Interrupted: the user or the system interrupted the run.

    Example: `with contained(): sys.exit()` raises InputError, and Ctrl-C during `with contained(): time.sleep(9)`
    raises KeyboardInterrupt.
    """
    process, folder = os.getpid(), _folder()
    try:
        with _noted_interrupts() as interrupts:
            try:
                yield
            except Interrupted:
                raise
            except BaseException as error:
                if isinstance(error, Exception) and not interrupts:
                    raise
                if not interrupts:
                    name = type(error).__name__
                    raise InputError(f"a task must not end the run, got {name}: {error}; catch it") from error
        if interrupts:
            raise KeyboardInterrupt
    finally:
        if os.getpid() != process:
            # The code forked, so the block returns twice; only the original continues the run.
            os._exit(0)
        if folder is not None and _folder() != folder:
            with suppress(OSError):
                os.chdir(folder)


def in_copy(call: Callable[[], str], time_limit_s: float) -> str | None:
    """Return the result of a call in a forked copy of this process, which user code may crash or leave in any state.

    The result is None if the copy ends without one. Processes that the call has started end with the copy.

    Raises:
        TimeoutError: the call takes longer than the limit.

    Example: `in_copy(lambda: "found", 1.0)` is "found", and `in_copy(lambda: os._exit(1), 1.0)` is None.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python warns about forking with threads. The copy only makes the call and exits, so it needs none.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        with suppress(BaseException):
            os.setpgid(0, 0)
            # The first byte tells an empty answer from none, even if another process keeps the pipe open.
            os.write(writer, b"=" + call().encode()[: _MAX_ANSWER_BYTES - 1])
        os._exit(0)
    with suppress(OSError):
        # Either process may be the first to make the group.
        os.setpgid(process, process)
    os.close(writer)
    try:
        if not select.select([reader], [], [], time_limit_s)[0]:
            raise TimeoutError
        answer = os.read(reader, _MAX_ANSWER_BYTES).decode(errors="replace")
        return answer[1:] if answer else None
    finally:
        os.close(reader)
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)


def in_words(error: BaseException) -> str:
    """Return an error of user code as text: its location in the user's code if known, its type and its message.

    An error of Treering has no type, because the user did not raise it.

    Example: "rewards.py:7: ValueError: no number".
    """
    location = location_of(error)
    kind = "" if isinstance(error, TreeringError) else f"{type(error).__name__}: "
    return f"{'' if location is None else f'{location}: '}{kind}{_text_of(error)}"


def location_of(error: BaseException) -> str | None:
    """Return the "FILE:LINE" of the user's code that raised, or None if other code did.

    This is the innermost location outside of Treering, Python's library and installed packages.
    """
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{_short(error.filename)}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OTHERS)]
    if frames:
        return f"{_short(frames[-1].filename)}:{frames[-1].lineno}"
    return None if error.__cause__ is None else location_of(error.__cause__)


def location_of_frame(frame: FrameType) -> str | None:
    """Return the innermost "FILE:LINE" of the user's code that a thread runs, or None."""
    found = [each for each in traceback.extract_stack(frame) if not each.filename.startswith(_OTHERS)]
    return f"{_short(found[-1].filename)}:{found[-1].lineno}" if found else None


def location_of_function(function: object) -> str:
    """Return the "FILE:LINE" where a function begins, or its name if it is not a Python function."""
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    if code is None:
        return str(getattr(function, "__qualname__", type(function).__qualname__))
    return f"{_short(code.co_filename)}:{code.co_firstlineno}"


def _text_of(error: BaseException) -> str:
    """Return the error's text, also if the error's `__str__` raises."""
    try:
        return str(error)
    except Exception as other:
        return f"its text raises {type(other).__name__}"


def _short(file: str) -> str:
    path, folder = Path(file), _folder()
    return str(path.relative_to(folder)) if folder is not None and path.is_relative_to(folder) else file


@contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Yield a list that gets an entry for each Ctrl-C in the block, if Python's own handler would raise for it."""
    seen: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield seen
        return

    def note(signal_number: int, _: FrameType | None) -> None:
        seen.append(signal_number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _folder() -> str | None:
    """Return the working directory, or None if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def load_own(what: str, name: str, folders: Sequence[Path] = (Path(),)) -> ModuleType:
    """Import the module of "file.py:name" or "package.module:name".

    Files are looked up in the folders in order, and so are modules, before the rest of Python's import path. The
    folders stay on this process's path, because the code may import more when it is called.

    `what` is the kind of object for errors, such as "reward".

    Raises:
        ConfigError: the file or module does not exist, or importing it raises (with its file and line).

    Example: `load_own("reward", "rewards.py:short", [Path("conf")])` is the module of `conf/rewards.py`.
    """
    module, file = name.rpartition(":")[0], None
    if module.endswith(".py"):
        file = next(((folder / module).absolute() for folder in folders if (folder / module).is_file()), None)
        if file is None:
            listed = ", ".join(dict.fromkeys(str(folder.absolute()) for folder in folders))
            raise ConfigError(f"the {what} {name!r} needs a file: {module} is not in {listed}; check the path")
    near = [] if file is None else [file.parent]
    own = list(dict.fromkeys(str(folder.absolute()) for folder in [*near, *folders]))
    sys.path[:] = list(dict.fromkeys([*own, *sys.path]))
    try:
        with contained():
            importlib.invalidate_caches()
            return importlib.import_module(module) if file is None else _run_file(what, file)
    except Exception as error:
        raise ConfigError(
            f"importing the {what} {name!r} raises {in_words(error)}; correct the code or the spelling; looked up in "
            f"{', '.join(own)} and on Python's path"
        ) from error


def _run_file(what: str, file: Path) -> ModuleType:
    """Run a file as a new module, even if its name belongs to another module."""
    name = f"treering_{what}_{blake2b(str(file).encode(), digest_size=4).hexdigest()}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Data classes and pickle look the module up by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
