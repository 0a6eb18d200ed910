"""Samples of the bench sets for a machine without data: token ids and loss masks in one compressed file.

`python3 -m benchmarks.gpu.data [FOLDER]` writes it from the folder of real data, ids folded to a small vocabulary. Git
ignores the folder, because the data is not ours to ship.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError, TreeringError
from treering.types import TokenIds

FOLDER = Path(".gpu-data")
FILE = "forests.npz"
MAX_FILE_BYTES = 8 * 2**20

SETS = ("toolbench", "crosswords", "no_sharing", "hotpotqa", "math", "tau")
"""By importance: if time runs out, the last ones are not measured."""

SET_TOKENS = 65_536
"""Flat tokens of a set's sample, about."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """Trees to train: the branches of each, and the loss mask of every branch.

    Example: one tree of [5, 6, 7] and [5, 6, 8], all trained, has 6 flat tokens and 4 trained ones.
    """

    name: str
    groups: tuple[tuple[TokenIds, ...], ...]
    masks: tuple[NDArray[Any], ...]
    """0/1 [length] for each branch, trees in order; first entries are ignored."""

    def __post_init__(self) -> None:
        lengths = [branch.size for branch in self.sequences]
        if lengths != [mask.size for mask in self.masks]:
            raise InputError(f"workload {self.name!r} needs a mask entry for every token of each branch; align them")

    @property
    def sequences(self) -> list[TokenIds]:
        """All branches, trees in order."""
        return [branch for group in self.groups for branch in group]

    @property
    def num_flat_tokens(self) -> int:
        """Tokens of all branches."""
        return sum(branch.size for branch in self.sequences)

    @property
    def num_trained_tokens(self) -> int:
        """Trained tokens of all branches: the denominator of the loss."""
        return sum(int(np.count_nonzero(mask[1:])) for mask in self.masks)

    def loss_masks(self) -> Sequence[NDArray[Any]]:
        """One mask per branch, trees in order."""
        return self.masks


def write_workloads(workloads: Sequence[Workload], folder: Path) -> Path:
    """Writes `forests.npz` into a folder, created if missing.

    Raises:
        InputError: ids that need more than 16 bits, or a file too large to carry.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, NDArray[Any]] = {}
    for workload in workloads:
        tokens = np.concatenate(workload.sequences)
        if tokens.max() >= 2**16:
            raise InputError(f"workload {workload.name!r} has id {tokens.max()}: fold ids below 65,536 first")
        arrays[f"{workload.name}.tokens"] = tokens.astype(np.uint16)
        arrays[f"{workload.name}.lengths"] = np.array([branch.size for branch in workload.sequences], np.int32)
        arrays[f"{workload.name}.branches"] = np.array([len(group) for group in workload.groups], np.int32)
        arrays[f"{workload.name}.trained"] = np.packbits(np.concatenate(workload.masks).astype(bool))
    file = folder / FILE
    np.savez_compressed(file, **arrays)
    if file.stat().st_size > MAX_FILE_BYTES:
        raise InputError(f"{file} has {file.stat().st_size} bytes, over {MAX_FILE_BYTES}: write smaller samples")
    return file


def read_workloads(folder: Path = FOLDER) -> list[Workload]:
    """The workloads of a folder in the order in which they were written; none where it has no file."""
    file = folder / FILE
    if not file.is_file():
        return []
    with np.load(file, allow_pickle=False) as arrays:
        names = [key.removesuffix(".tokens") for key in arrays.files if key.endswith(".tokens")]
        return [_unpacked(name, *(arrays[f"{name}.{key}"] for key in ARRAYS)) for name in names]


ARRAYS = ("tokens", "lengths", "branches", "trained")


def _unpacked(name: str, *arrays: NDArray[Any]) -> Workload:
    tokens, lengths, branches, trained = arrays
    ends = np.cumsum(lengths)[:-1]
    sequences = iter(np.split(tokens.astype(np.int32), ends))
    masks = np.split(np.unpackbits(trained, count=tokens.size), ends)
    groups = tuple(tuple(next(sequences) for _ in range(count)) for count in branches.tolist())
    return Workload(name=name, groups=groups, masks=tuple(masks))


def sample_workloads(num_tokens: int = SET_TOKENS) -> list[Workload]:
    """Samples of the bench sets in the folder of real data.

    Raises:
        InputError: no such folder.
    """
    from benchmarks.tree.sets import find_source  # imported late: machines with a device may lack its packages

    source = find_source()
    if source is None:
        raise InputError("there is no folder of real data to sample: set TREERING_DATA to one")
    samples = [source.sample(name, num_tokens=num_tokens) for name in SETS]
    return [
        Workload(name=sample.name, groups=tuple(sample.groups), masks=tuple(sample.loss_masks())) for sample in samples
    ]


def main() -> None:
    """Samples, writes, and prints a line per set."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu.data", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help=f"an ignored folder (default {FOLDER})")
    parser.add_argument("--tokens", type=int, default=SET_TOKENS, metavar="N", help="flat tokens of each set, about")
    given = parser.parse_args()
    try:
        workloads = sample_workloads(given.tokens)
        file = write_workloads(workloads, given.folder)
    except TreeringError as error:
        parser.error(str(error))
    for workload in workloads:
        print(f"{workload.name:12} {len(workload.groups):4} trees  {workload.num_flat_tokens:7,} flat tokens")
    print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
