"""Prompts whose tokens and columns lie in mapped files, so that a large set of them costs no memory of its own."""

import mmap
import pickle
import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, overload

from treering.closing import Closing
from treering.data.cache.dataset import TokenDataset
from treering.errors import StateError
from treering.rl.tasks.task import Prompt, prompt_id_of
from treering.types import PromptId

_RELEASE_BYTES = 1 << 26


def prompt_of(
    tokens: TokenDataset, row: int, prompt_id: PromptId | None, answer: str | None, columns: Mapping[str, Any]
) -> Prompt:
    """The prompt of a row of tokens and pictures; without an id it is named by what it shows."""
    ids, pictures = tokens.tokens(row), tokens.placed(row)
    return Prompt(
        prompt_id=prompt_id_of(ids, pictures) if prompt_id is None else prompt_id,
        tokens=ids,
        pictures=pictures,
        answer=answer,
        columns=columns,
    )


class PromptWriter(Closing):
    """Writes what prompts have beside their tokens, in a `with` statement; what `prompts` gives may be read after it.

    Example: after `writer.add(2, prompt)`, `writer.prompts()[0]` has the tokens of row 2 and the prompt's columns.
    """

    def __init__(self, tokens: TokenDataset) -> None:
        """Opens a file without a name, which is gone with the last process that reads it.

        `tokens`: the tokens and pictures of prompts.
        """
        self._tokens = tokens
        self._ends, self._rows = array("q", [0]), array("q")
        try:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        except OSError as error:
            raise _cannot_write(error) from error

    def close(self) -> None:
        """Closes the file; what is mapped stays readable."""
        # What a full disk has refused is refused again.
        with suppress(OSError):
            self._file.close()

    def add(self, row: int, prompt: Prompt) -> None:
        """Adds the prompt of a row.

        Raises:
            StateError: the disk is full.
        """
        content = pickle.dumps((prompt.prompt_id, prompt.answer, prompt.columns), pickle.HIGHEST_PROTOCOL)
        try:
            self._file.write(content)
        except OSError as error:
            raise _cannot_write(error) from error
        self._ends.append(self._ends[-1] + len(content))
        self._rows.append(row)

    def prompts(self) -> Sequence[Prompt]:
        """All prompts, of which there is at least one; nothing can be added any more.

        Raises:
            StateError: the disk is full.
        """
        try:
            self._file.flush()
            content = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise _cannot_write(error) from error
        return _StoredPrompts(self._tokens, self._rows, content, self._ends)


class ChosenPrompts(Sequence[Prompt]):
    """Some of a sequence of prompts, each read when it is asked for.

    Example: `ChosenPrompts(prompts, range(0, len(prompts), 2))` is every second one.
    """

    def __init__(self, prompts: Sequence[Prompt], numbers: Sequence[int]) -> None:
        """`numbers`: places in `prompts`, in the order wanted."""
        self._prompts, self._numbers = prompts, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, place: int | slice) -> Prompt | Sequence[Prompt]:
        """A prompt, or those of a slice."""
        if isinstance(place, slice):
            return ChosenPrompts(self._prompts, self._numbers[place])
        return self._prompts[self._numbers[place]]


class _StoredPrompts(Sequence[Prompt]):
    def __init__(self, tokens: TokenDataset, rows: "array[int]", content: mmap.mmap, ends: "array[int]") -> None:
        self._tokens, self._rows = tokens, rows
        self._content, self._ends, self._num_read = content, ends, 0

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[Prompt]:
        return map(self.__getitem__, range(len(self)))

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, place: int | slice) -> Prompt | Sequence[Prompt]:
        """A prompt, made anew, or those of a slice."""
        numbers = range(len(self))[place]
        if isinstance(numbers, range):
            return ChosenPrompts(self, numbers)
        content = self._content[self._ends[numbers] : self._ends[numbers + 1]]
        self._count(len(content))
        # The process has written it itself, into a file that no other can name.
        return prompt_of(self._tokens, self._rows[numbers], *pickle.loads(content))

    def _count(self, num_bytes: int) -> None:
        """Gives pages that were read back to the system now and then."""
        self._num_read += num_bytes
        if self._num_read > _RELEASE_BYTES:
            self._num_read = 0
            self._content.madvise(mmap.MADV_DONTNEED)


def _cannot_write(error: OSError) -> StateError:
    return StateError(
        f"prompts are kept in the folder of temporary files while a run trains, and it cannot be written "
        f"({error.strerror or error}); free some space, or name another folder by TMPDIR"
    )
