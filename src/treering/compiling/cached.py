"""Whether functions of numba were compiled on this machine before."""

from pathlib import Path
from typing import Any


def is_compiled(function: Any) -> bool:
    """Whether numba's cache folder holds a function of `compiled_once`; its first call compiles it otherwise.

    A function that is not numba's, or that has no cache, counts as compiled.

    Example: `is_compiled(propose)` is False after an installation, and True once anything was drafted.
    """
    folder = getattr(getattr(function, "stats", None), "cache_path", None)
    if folder is None:
        return True
    code = function.py_func.__code__
    # numba names an index FILE.NAME-LINE.py311.nbi
    return any(Path(folder).glob(f"{Path(code.co_filename).stem}.*{code.co_name}-{code.co_firstlineno}.*.nbi"))
