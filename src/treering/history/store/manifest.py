"""The manifest of a folder: which blocks of which data files are the published state, and the ledger of its blocks.

It is replaced whole, so a reader sees one published state. It pins every byte of that state: a file's digest covers the
checksums of its blocks.
"""

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from treering.errors import InputError
from treering.history.store.files import read_file, seal, unseal
from treering.types import PromptId

MAGIC = b"RINGLIST"
NAME = "manifest.bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A data file of the published state.

    Attributes:
        number: of the file.
        digest: of its header.
        alive: a bit for each of its blocks, most significant first, 1 if it is alive.

    Example: with `bytes([0xA0])` blocks 0 and 2 are alive.
    """

    number: int
    digest: str
    alive: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A published state.

    Attributes:
        next_number: of the next data file, greater than all existing numbers.
        files: in the order of writing.
    """

    next_number: int
    files: Sequence[Listed]


def data_file(folder: Path, number: int) -> Path:
    """The path of a data file.

    Example: 7 gives `history-00000007.bin`.
    """
    return folder / f"history-{number:08d}.bin"


def read(file: Path) -> Manifest:
    """The manifest in a file.

    Raises:
        OSError: the file is missing or cannot be read.
        InputError: it is damaged.
    """
    return decode(read_file(file))


def warn(file: Path, error: OSError | InputError, consequence: str) -> None:
    """Warns that a manifest cannot be used (law 7), and of the consequence."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    warnings.warn(f"{file} cannot be used: {reason}; {consequence}", stacklevel=3)


def encode(manifest: Manifest) -> bytes:
    """The bytes of a manifest."""
    files = [[listed.number, listed.digest, listed.alive.hex()] for listed in manifest.files]
    return seal(MAGIC, {"next_number": manifest.next_number, "files": files})[0]


def decode(data: bytes) -> Manifest:
    """The inverse of `encode`.

    Raises:
        InputError: the bytes are damaged, with a short reason.
    """
    header, _, end = unseal(MAGIC, data)
    if end != len(data):
        raise InputError("damaged: there are bytes after its end")
    files = [
        Listed(number=number, digest=digest, alive=bytes.fromhex(alive)) for number, digest, alive in header["files"]
    ]
    return Manifest(next_number=header["next_number"], files=files)


@dataclass(slots=True, kw_only=True, eq=False)
class _File:
    digest: str
    bits: bytearray  # one for each block that is alive
    alive: dict[PromptId, tuple[int, int]]  # number of its block, and bytes
    num_bytes: int
    num_alive: int


class Ledger:
    """Which blocks of every data file are alive.

    Example: file 0 has q1 of 100 bytes and q2 of 60, then file 1 has another q1 of 80: of file 0's 160 bytes 60 are
    alive, less than half, so it should be merged.
    """

    def __init__(self) -> None:
        """A ledger without files."""
        self._files: dict[int, _File] = {}
        self._homes: dict[PromptId, int] = {}

    def take_in(self, number: int, digest: str, blocks: Sequence[tuple[PromptId, int]], alive: bytes | None) -> None:
        """Adds a data file; its live blocks replace earlier blocks of the same prompts.

        Args:
            number: greater than those of earlier files.
            digest: of its header.
            blocks: prompt and bytes of each.
            alive: a bit for each block, see `Listed`; None if all are alive.
        """
        bits = bytearray(alive if alive is not None else all_alive(len(blocks)))
        held = {prompt: (i, size) for i, (prompt, size) in enumerate(blocks) if bits[i // 8] & 128 >> i % 8}
        for prompt_id in held:
            self.forget(prompt_id)
            self._homes[prompt_id] = number
        num_alive = sum(size for _, size in held.values())
        num_bytes = sum(size for _, size in blocks)
        self._files[number] = _File(digest=digest, bits=bits, alive=held, num_bytes=num_bytes, num_alive=num_alive)

    def forget(self, prompt_id: PromptId) -> bool:
        """Marks a prompt's block as dead; returns whether there was one."""
        number = self._homes.pop(prompt_id, None)
        if number is None:
            return False
        file = self._files[number]
        block, size = file.alive.pop(prompt_id)
        file.bits[block // 8] &= ~(128 >> block % 8)
        file.num_alive -= size
        return True

    def remove(self, numbers: Collection[int]) -> None:
        """Removes data files and their live blocks."""
        for number in numbers:
            for prompt_id in self._files.pop(number).alive:
                if self._homes[prompt_id] == number:
                    del self._homes[prompt_id]

    def prompts(self, numbers: Collection[int]) -> list[PromptId]:
        """The prompts whose blocks in some files are alive."""
        return [prompt_id for number in numbers for prompt_id in self._files[number].alive]

    def foldable(self, num_bytes: int, file_bytes: int) -> list[int]:
        """Files whose live blocks should be merged into the next file, ascending.

        These are files less than half alive, and small ones: no larger than the bytes written anyway, so that merging
        rewrites a rollout about once per doubling of its file.

        Args:
            num_bytes: written anyway.
            file_bytes: approximate size of a file; half of it is not small.
        """
        folded = [number for number, file in self._files.items() if 2 * file.num_alive < file.num_bytes]
        num_bytes += sum(self._files[number].num_alive for number in folded)
        others = self._files.keys() - folded
        for number in sorted(others, key=lambda number: (self._files[number].num_alive, number)):
            num_alive = self._files[number].num_alive
            if num_alive > num_bytes or 2 * num_alive >= file_bytes:
                break
            folded.append(number)
            num_bytes += num_alive
        return sorted(folded)

    def listed(self, without: Collection[int]) -> list[Listed]:
        """The files for a manifest."""
        return [
            Listed(number=number, digest=file.digest, alive=bytes(file.bits))
            for number, file in self._files.items()
            if number not in without
        ]


def all_alive(num_blocks: int) -> bytes:
    """The bits of a file whose blocks are all alive.

    Example: 3 gives the bits 111 and five zeros, 0xe0.
    """
    whole, rest = divmod(num_blocks, 8)
    return b"\xff" * whole + (bytes([0xFF00 >> rest & 0xFF]) if rest else b"")
