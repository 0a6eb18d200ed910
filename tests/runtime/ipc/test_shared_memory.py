"""Shared memory is refused where there is no room for it, and needs no /dev/shm."""

import os
import tempfile

import pytest

from treering.errors import StateError
from treering.runtime.ipc import shared_memory
from treering.runtime.ipc.shared_memory import SharedMemory

EXBIBYTE = 1 << 60


def test_more_than_the_free_memory_is_refused_with_both_numbers() -> None:
    free = shared_memory._free_memory()
    assert free is not None
    assert 0 < free < EXBIBYTE
    with pytest.raises(StateError, match=rf"{EXBIBYTE:,} bytes, and [\d,]+ bytes of memory are free.*rl\.staleness"):
        SharedMemory(EXBIBYTE)


def test_without_unnamed_memory_the_room_is_that_of_the_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    memory = SharedMemory(64)
    memory.view[:2] = b"ab"
    memory.close()
    with pytest.raises(StateError, match=rf"bytes on {tempfile.gettempdir()} are free"):
        SharedMemory(EXBIBYTE)
