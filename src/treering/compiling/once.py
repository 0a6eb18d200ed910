"""Compile a function in one process of a machine, while the others wait for the result and load it.

numba keeps compiled functions in a folder, but processes that start together would each find it empty, and compile.
"""

import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher

from treering.errors import StateError
from treering.files.lock import FileLock

_WAIT_S = 60.0
"""Longest wait for the lock: a function takes a few seconds, so a process that holds it longer is stuck."""
_PAUSE_S = 0.05


def compiled_once(*, stamp: int = 0, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile like `numba.njit(cache=True)` with further options, in one process at a time.

    A process that ends releases its lock, and one that is stuck is waited for at most a minute. If the cache folder
    cannot be written, each process compiles for itself. A cached function is loaded if it was compiled from an equal
    file under the same `stamp`, such as a checksum of the other files that it uses.

    Example:
        >>> @compiled_once(nogil=True)
        ... def double(number):
        ...     return 2 * number
        >>> double(3)
        6
    """

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = _Dispatcher(function, targetoptions={"nopython": True, "boundscheck": None, **options})
        dispatcher.enable_caching()
        if isinstance(dispatcher._cache, _Cache):
            dispatcher._cache.stamp = stamp
        return dispatcher

    return decorate


def is_compiled(function: Any) -> bool:
    """Return whether numba's cache folder holds a function of `compiled_once`; otherwise its first call compiles it.

    A function that is not from numba, or has no cache, counts as compiled.

    Example: `is_compiled(propose)` is False after an installation, and True after the first draft.
    """
    folder = getattr(getattr(function, "stats", None), "cache_path", None)
    if folder is None:
        return True
    code = function.py_func.__code__
    # numba names an index FILE.NAME-LINE.py311.nbi
    return any(Path(folder).glob(f"{Path(code.co_filename).stem}.*{code.co_name}-{code.co_firstlineno}.*.nbi"))


class _Cache(FunctionCache):  # type: ignore[misc]
    """Cached machine code of a function; if it is missing while another process compiles, wait for that process."""

    held: ExitStack | None = None
    """Exit stack of the running compilation, which takes the lock."""
    stamp: int = 0

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        key = super()._index_key(sig, codegen)
        return (*key, self.stamp) if self.stamp else key

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super().load_overload(sig, target_context)
        if found is not None or self.held is None:
            return found
        lock = _lock(Path(self.cache_path, "compiling.lock"))
        if lock is None:
            return None
        self.held.callback(lock.release)
        return super().load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_uncached(f"{self.cache_path}: {error.strerror or error}")


class _Dispatcher(CPUDispatcher):  # type: ignore[misc]
    def enable_caching(self) -> None:
        try:
            self._cache = _Cache(self.py_func)
        except RuntimeError:
            _warn_uncached("no folder can be written")

    def compile(self, sig: Any) -> Any:
        # A caller that is being compiled holds the lock.
        if global_compiler_lock.is_locked() or not isinstance(self._cache, _Cache):
            return super().compile(sig)
        # First numba's lock and then that of the file, in every thread.
        with global_compiler_lock, ExitStack() as held:
            self._cache.held = held
            held.callback(setattr, self._cache, "held", None)
            return super().compile(sig)


def _lock(file: Path) -> FileLock | None:
    """Return the lock once its holder has released it; None if it cannot be had."""
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            return FileLock(file, lambda holder: f"{holder} compiles")
        except StateError:
            time.sleep(_PAUSE_S)
        except OSError:
            return None
    return None


def _warn_uncached(reason: str) -> None:
    warnings.warn(
        f"compiled functions cannot be cached ({reason}), so each process compiles for itself, for up to a minute; set "
        "NUMBA_CACHE_DIR to a folder that can be written",
        stacklevel=3,
    )
