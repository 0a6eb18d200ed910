"""Helpers for tests of stores and their folders."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from treering.history.store.history_reader import HistoryReader
from treering.history.store.prompt_index import PromptIndex
from treering.history.store.store import HistoryStore

ARRAYS = tuple(field.name for field in fields(PromptIndex))
ADDS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", 7]),
        st.integers(0, 5),
        st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=3),
        st.booleans(),
    ),
    max_size=12,
)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def contents(store: HistoryStore | HistoryReader) -> dict[Any, dict[int, list[int]]]:
    """Return prompt -> version -> text."""
    return {
        prompt: {version: text.tolist() for version, text in index.texts().items()}
        for prompt, index in store.snapshot.items()
    }


def assert_equal_snapshots(a: HistoryStore, b: HistoryStore | HistoryReader) -> None:
    """Check that prompts, their order and their arrays are equal."""
    assert list(a.snapshot) == list(b.snapshot)
    for prompt_id in a.snapshot:
        assert_equal_indexes(a.snapshot[prompt_id], b.snapshot[prompt_id])


def assert_equal_indexes(a: PromptIndex, b: PromptIndex) -> None:
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), strict=True)


def write(folder: Path, *publishes: dict[str, list[int]], **options: int) -> HistoryStore:
    """Return a closed store on the folder; publish i adds one rollout of version i per prompt."""
    with HistoryStore(folder, **options) as store:
        for version, rollouts in enumerate(publishes):
            for prompt_id, tokens in rollouts.items():
                store.add(prompt_id, [np.array(tokens, np.int32)], version)
            store.publish()
    return store


def reopened(folder: Path, **options: int) -> HistoryStore:
    """Return a closed store that has read the whole folder."""
    with HistoryStore(folder, **options) as store:
        contents(store)
    return store


def names_in(folder: Path) -> list[str]:
    """Return the names of all files that are not hidden."""
    return sorted(file.name for file in folder.glob("[!.]*"))


def data_files(folder: Path) -> list[Path]:
    """Return the data files, oldest first."""
    return sorted(folder.glob("history-*.bin"))


def num_bytes_on_disk(folder: Path) -> int:
    """Return the size of all data files, headers included."""
    return sum(file.stat().st_size for file in data_files(folder))


def large(start: int) -> list[int]:
    """Return a rollout large enough that its file is not merged: 1.6 MB with its index."""
    return [start] * 200_000
