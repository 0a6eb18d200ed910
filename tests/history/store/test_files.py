"""Damaged headers are refused, and files appear whole or not at all."""

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from treering.errors import InputError
from treering.history.store import manifest
from treering.history.store.files import seal, unseal, write_whole
from treering.history.store.manifest import Listed, Manifest

MAGIC = b"RINGTEST"


def test_every_flipped_bit_and_every_cut_of_a_header_is_noticed() -> None:
    data, _ = seal(MAGIC, {"a": [1, 2]})
    for i in range(len(data)):
        for bit in range(8):
            with pytest.raises(InputError):
                unseal(MAGIC, data[:i] + bytes([data[i] ^ 1 << bit]) + data[i + 1 :])
        with pytest.raises(InputError):
            unseal(MAGIC, data[:i])


def test_a_file_on_a_full_disk_does_not_appear_and_the_old_one_stays(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_whole(file, [b"old", b"!"])
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(file, [bytes(600)] * 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert os.listdir(tmp_path) == ["file"]
    assert file.read_bytes() == b"old!"


def test_a_manifest_comes_back_and_nothing_may_stand_behind_it() -> None:
    files = [Listed(number=i, digest="ab" * 32, alive=np.packbits([1, 0, 1] * (i + 1)).tobytes()) for i in range(4)]
    state = Manifest(next_number=9, files=files)
    assert manifest.decode(manifest.encode(state)) == state
    with pytest.raises(InputError, match="after its end"):
        manifest.decode(manifest.encode(state) + b"\0")
