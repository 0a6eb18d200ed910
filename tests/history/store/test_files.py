"""Sealed headers are read as written or refused with the reason, and files appear whole or not at all."""

import os
import resource
import struct
from pathlib import Path

import numpy as np
import pytest

from treering.errors import InputError
from treering.history.store import manifest
from treering.history.store.files import seal, unseal, write_whole
from treering.history.store.manifest import Listed, Manifest

MAGIC = b"RINGTEST"


def test_a_header_comes_back_with_its_digest_whatever_stands_behind_it() -> None:
    header = {"a": [1, "ü\n"], "b": {}}
    data, digest = seal(MAGIC, header)
    for behind in (b"", b"more"):
        assert unseal(MAGIC, data + behind) == (header, digest, len(data))
    assert digest != seal(MAGIC, {"a": [2, "ü\n"], "b": {}})[1]


def test_every_flipped_bit_and_every_cut_of_a_header_is_noticed() -> None:
    data, _ = seal(MAGIC, {"a": [1, 2]})
    for i in range(len(data)):
        for bit in range(8):
            with pytest.raises(InputError):
                unseal(MAGIC, data[:i] + bytes([data[i] ^ 1 << bit]) + data[i + 1 :])
        with pytest.raises(InputError):
            unseal(MAGIC, data[:i])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "cut off"),
        (b"RING", "cut off"),
        (b"PK\3\4" + bytes(90), "no file of a history"),
        (MAGIC + bytes(20), "cut off"),
        (MAGIC + struct.pack("<II", 1, 4) + bytes(90), "of format 1, and this Treering reads format 3"),
        (MAGIC + struct.pack("<II", 3, 2**32 - 1) + bytes(90), "cut off or damaged in its header"),
    ],
)
def test_other_bytes_are_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        unseal(MAGIC, data)


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
