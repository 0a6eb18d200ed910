"""Blocks are used in place and checked on first use, and a damaged one does not affect the others."""

import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering.history.store import blocks
from treering.history.store.prompt_index import PromptIndex, as_text

NAMES = tuple(field.name for field in fields(PromptIndex))
INDEXES = st.lists(
    st.dictionaries(
        st.integers(0, 9),
        st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=40), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    ),
    max_size=4,
)


def index_of(versions: dict[int, list[list[int]]]) -> PromptIndex:
    texts = {version: as_text(np.array(rollout, np.int32) for rollout in each) for version, each in versions.items()}
    return PromptIndex.build(texts)


def file_of(*indexes: PromptIndex) -> bytes:
    parts, _ = blocks.encode(3, [(f"q{i}", 10 + i, index) for i, index in enumerate(indexes)])
    return b"".join(bytes(part) for part in parts)


def assert_equal(a: PromptIndex, b: PromptIndex) -> None:
    for name in NAMES:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), strict=True)
        assert not getattr(a, name).flags.writeable


@given(INDEXES)
def test_indexes_come_back_from_a_file_and_say_their_sizes_before(versions: list[Any]) -> None:
    indexes = [index_of(each) for each in versions]
    contents = blocks.decode(file_of(*indexes), Path("file"))
    assert (contents.number, len(contents.blocks)) == (3, len(indexes))
    for i, (block, index) in enumerate(zip(contents.blocks, indexes, strict=True)):
        assert (block.prompt_id, block.place) == (f"q{i}", 10 + i)
        assert block.versions == tuple(index.versions.tolist())
        assert (block.num_bytes, block.num_tokens) == (index.num_bytes, index.num_tokens)
        assert_equal(block.index, index)
        assert block.index is block.index
        assert_equal(block.copied(), index)


def test_arrays_lie_in_the_map_of_the_file_at_multiples_of_64_bytes_and_outlive_it(tmp_path: Path) -> None:
    file, index = tmp_path / "file", index_of({0: [[1, 2, 3]], 4: [[5] * 33]})
    file.write_bytes(file_of(index, index))
    contents = blocks.map_file(file, 3, None)
    file.unlink()
    for block in contents.blocks:
        for name in NAMES:
            array = getattr(block.index, name)
            assert array.__array_interface__["data"][0] % 64 == 0
            assert array.base is not None, "a copy"
        assert_equal(block.index, index)
        assert block.copied().text.base is None


def test_a_block_that_nobody_asks_for_is_not_looked_at(tmp_path: Path) -> None:
    data = bytearray(file_of(index_of({0: [[7, 7]]}), index_of({0: [[8, 8]]})))
    data[data.index(np.array([-1, 7, 7], np.int32).tobytes())] ^= 1
    contents = blocks.decode(bytes(data), Path("file"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert contents.blocks[1].index.text.tolist() == [-1, 8, 8]
    with pytest.warns(UserWarning, match=r"prompt 'q0' in file are left out: damaged.*costs speed only") as warned:
        damaged = contents.blocks[0].index
    assert len(warned) == 1
    assert damaged.text.size == damaged.versions.size == damaged.num_tokens == 0
    assert damaged.texts() == {}
    assert damaged.without_oldest() is None
    assert contents.blocks[0].index is damaged


def test_a_file_that_is_cut_after_it_was_mapped_loses_the_blocks_behind_the_cut(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(file_of(*(index_of({0: [[i] * 2000]}) for i in range(4))))
    contents = blocks.map_file(file, 3, None)
    with file.open("r+b") as stream:
        stream.truncate(20_000)
    assert contents.blocks[0].index.num_tokens == 2000
    for block in contents.blocks[1:]:
        with pytest.warns(UserWarning, match="cut off"):
            assert block.index.num_tokens == 0
