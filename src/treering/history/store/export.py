"""A whole history in one checksummed file, as checkpoints save it."""

from collections.abc import Mapping
from pathlib import Path

from treering.arrays import Int32Array
from treering.errors import InputError, StateError
from treering.history.store import blocks
from treering.history.store.blocks import warn_of_file
from treering.history.store.files import read_file, write_whole
from treering.history.store.prompt_index import PromptIndex
from treering.history.store.rollouts import RolloutKey
from treering.history.store.snapshot import Snapshot
from treering.types import PromptId


def write_saved(file: Path, snapshot: Snapshot, pending: Mapping[RolloutKey, Int32Array]) -> None:
    """Writes published and pending rollouts, whole or not at all; damaged prompts are left out.

    Raises:
        StateError: the file cannot be written; an older one of that name is unchanged.
    """
    indexes = ((prompt_id, snapshot.place(prompt_id), index) for prompt_id, index in snapshot.items())
    parts, _ = blocks.encode(0, (entry for entry in indexes if entry[2].text.size), pending)
    try:
        write_whole(file, parts)
    except OSError as error:
        raise StateError(
            f"a history is saved into a folder that can be written, and {file} failed ({error.strerror}); "
            "make its folder or free space, and save again"
        ) from error


def read_saved(file: Path) -> tuple[dict[PromptId, tuple[int, PromptIndex]], Mapping[RolloutKey, Int32Array]]:
    """The inverse of `write_saved`, as copies: places and indexes by prompt, and pending rollouts.

    A missing or damaged file costs one warning and gives nothing; a damaged prompt costs one and is left out.

    Example: a history of prompt "q" gives ({"q": (0, index)}, {}).
    """
    try:
        contents = blocks.decode(read_file(file), file)
    except (OSError, InputError) as error:
        warn_of_file(file, error)
        return {}, {}
    whole = (block for block in contents.blocks if block.index.text.size)
    return {block.prompt_id: (block.place, block.copied()) for block in whole}, contents.pending
