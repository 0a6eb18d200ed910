"""The sources of this folder as one number, for compiled functions that are cached and call into other files.

Numba finds a cached result by the function's own file, so a change in a file that it calls into would go unseen. What
a function closes over belongs to the key as well: it closes over the stamp. Knows files; knows nothing of what is in
them.
"""

import zlib
from pathlib import Path


def stamp_of(folder: Path) -> int:
    """A number that changes with any source file of a folder."""
    stamp = 0
    for file in sorted(folder.glob("*.py")):
        stamp = zlib.crc32(file.read_bytes(), stamp)
    return stamp


STAMP = stamp_of(Path(__file__).parent)
