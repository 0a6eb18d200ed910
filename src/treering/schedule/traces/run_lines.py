"""The lines of the files that a run writes itself, the last of which a kill may have torn."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from treering.data.formats.files import numbered_lines

Note = Callable[[str], None]
"""Takes a sentence for the user."""


def whole_lines(file: Path, note: Note) -> Iterator[tuple[int, bytes]]:
    """The lines of a run's file with their numbers from 1, without a torn last one.

    A last line is torn if it has no line break and is no JSON: the run was killed while it wrote. It is left out, and
    `note` gets a sentence with file and line. A run that resumes writes it again.

    Raises:
        InputError: the file cannot be read.

    Example: of the lines `{"step": 1}` and `{"st`, the second without a line break, only the first is given.
    """
    for number, line in numbered_lines(file):
        if not line.endswith(b"\n") and not _is_json(line):
            note(f"{file}:{number}: the last line is torn, as by a kill while it was written, and is left out")
            return
        yield number, line


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
