"""Functions that exist only inside the compiled functions that call them: quick to compile, and without references.

numba compiles every function separately, with machine code and wrappers for calls from Python and C, and again as a
part of each caller. For a small function that is always inlined most of this is wasted: two thirds of the time that a
drafter took to compile. `lean` skips it; the function is optimised once, within its caller.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from numba import njit
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.registry import CPUDispatcher
from numba.core.typed_passes import NativeLowering
from numba.core.types.misc import unliteral

from treering.compiling.once import compiled_once

_OPTIONS = {"_nrt": False, "error_model": "numpy"}


def kernel_of(stamp: int) -> Callable[[Callable[..., Any]], Any]:
    """Return `compiled_once` for functions that Python calls without the interpreter lock, and that make no arrays.

    No references are counted, as in `lean` functions, and nothing is compiled for callers in C. A division by zero does
    not raise.
    """
    return compiled_once(stamp=stamp, nogil=True, no_cfunc_wrapper=True, **_OPTIONS)


kernel = kernel_of(0)
"""`kernel_of` for functions that use nothing from other files."""


def lean(function: Callable[..., Any] | None = None, *, inline: bool = True, fastmath: Collection[str] = ()) -> Any:
    """Compile a function like `numba.njit`, only for compiled callers; a function that makes arrays fails to compile.

    No references are counted in it: counting takes atomic operations, which is most of the time in loops of a few
    nanoseconds. A division by zero does not raise, so the divisor must be checked before. Called from Python, in tests,
    it is compiled separately in every process.

    Args:
        function: function to compile; None returns a decorator with these options.
        inline: inline the function at every call. Otherwise it is optimised before its callers, so that its loops are
            vectorised alike in each of them.
        fastmath: LLVM's flags, as in `numba.njit`.

    Example:
        >>> @lean
        ... def double(number):
        ...     return 2 * number
        >>> @njit
        ... def quadruple(number):
        ...     return double(double(number))
        >>> quadruple(3)
        12
    """
    if function is None:
        return partial(lean, inline=inline, fastmath=fastmath)
    options = {**_OPTIONS, "fastmath": set(fastmath)}
    wrappers = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return _Lean(
        function,
        targetoptions={"nopython": True, "forceinline": inline, **wrappers, **options},
        pipeline_class=_Compiler,
    )


class _Lean(CPUDispatcher):  # type: ignore[misc]
    """Function for each list of argument types, without machine code from numba."""

    _standalone: Any = None

    def __call__(self, *args: Any) -> Any:
        """Call the function compiled separately: numba would otherwise jump to an address that does not exist."""
        if self._standalone is None:
            self._standalone = njit(**_OPTIONS, fastmath=self.targetoptions["fastmath"])(self.py_func)
        return self._standalone(*args)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Treat constants as numbers of their type: numba would compile for each, and inlining finds them anyway."""
        return super().get_call_template([unliteral(arg) for arg in args], kws)

    def add_overload(self, cres: Any) -> None:
        """Take a compiled function, for compiled callers only."""
        self.overloads[tuple(cres.signature.args)] = cres


class _Library(JITCodeLibrary):  # type: ignore[misc]
    """Intermediate code that is only linked into other libraries, never made executable."""

    def _finalize_final_module(self) -> None:
        self._finalized = True


class _InlinedLibrary(_Library):
    """Intermediate code that is optimised only as a part of its callers."""

    def _optimize_final_module(self) -> None:
        pass


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(NativeLowering):  # type: ignore[misc]
    """Lowering into a `_Library`."""

    _name = "lean_lowering"

    def run_pass(self, state: Any) -> bool:
        """Lower, and register the function for compiled callers under its own key."""
        library = _InlinedLibrary if state.flags.forceinline else _Library
        state.library = library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        state.flags.no_compile = True
        super().run_pass(state)
        lowered, key = state.cr, object()
        state.targetctx.insert_user_function(key, lowered.fndesc, [state.library])
        state.cr = lowered._replace(cfunc=key)
        return True


class _Compiler(CompilerBase):  # type: ignore[misc]
    """numba's own passes, with `_Lowering` in place of its lowering."""

    def define_pipelines(self) -> list[Any]:
        """Return the one pipeline."""
        passes = PassManager("lean")
        for step, description in DefaultPassBuilder.define_nopython_pipeline(self.state).passes:
            passes.add_pass(_Lowering if step is NativeLowering else step, description)
        passes.finalize()
        return [passes]
