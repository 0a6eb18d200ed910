"""Paged attention in triton's interpreter equals softmax over each token's explicit list of slots."""

import numpy as np
import pytest
import torch

from tests.engine.decoder.cuda_cases import INTERPRETED_ONLY, Row, batch_of, expected_attention, random_case
from treering.engine.decoder.cuda.cuda_decoder import PassTables, bucket, make_tables

attend_module = pytest.importorskip("treering.engine.decoder.cuda.layer_kernels")
pytestmark = INTERPRETED_ONLY

CHAINS = [Row(prefix=0, own=1), Row(prefix=5, own=3), Row(prefix=20, own=33, num_fed=3)]
TREES = [
    Row(prefix=17, own=4, parents=(-1, 0, -1, 2, 2, 0)),
    Row(prefix=0, own=2, parents=(-1, -1)),
    Row(prefix=3, own=20),
]


def attended(case: dict, tables: PassTables, *, num_parts: int, num_tokens: int, num_tiles: int) -> torch.Tensor:
    """Run the kernels with tables padded to a bucket."""
    tokens = np.zeros((6, num_tokens), np.int64)
    tokens[:, : tables.tokens.shape[1]] = tables.tokens
    tiles = np.zeros((num_tiles, 6), np.int64)
    tiles[: tables.tiles.shape[0]] = tables.tiles
    size, heads, head_size = case["qkv"].shape[0], case["num_heads"], case["keys"].shape[2]
    qkv = torch.zeros(num_tokens, case["qkv"].shape[1], dtype=case["qkv"].dtype)
    qkv[:size] = case["qkv"]
    out = torch.full((num_tokens, heads * head_size), torch.nan, dtype=qkv.dtype)
    attend_module.attend(
        qkv,
        case["keys"],
        case["values"],
        torch.from_numpy(tokens),
        torch.from_numpy(tiles),
        case["table"],
        torch.full((num_parts, num_tokens, heads, head_size), torch.nan),
        torch.full((num_parts, num_tokens, heads), torch.nan),
        out,
        rows=tables.rows,
    )
    filling = out[size:]
    assert filling.isnan().all() if num_parts == 1 else (filling == 0).all()
    return out[:size]


@pytest.mark.parametrize("rows", [CHAINS, TREES], ids=["chains", "trees"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), [(4, 2, 16), (3, 1, 24), (2, 2, 64)])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_every_token_sees_its_own_slots_and_no_others(
    rows: list[Row], num_heads: int, num_kv_heads: int, head_size: int, num_parts: int
) -> None:
    case = random_case(rows, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size)
    tables = make_tables(case["batch"], num_heads // num_kv_heads)
    out = attended(case, tables, num_parts=num_parts, num_tokens=16, num_tiles=tables.tiles.shape[0] + 1)
    assert torch.allclose(out, expected_attention(case), rtol=0, atol=1e-5)


def test_one_part_takes_one_kernel_and_equals_two_parts_with_one_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # All keys of a row fit one tile of 32, so the second part has none.
    case = random_case(TREES, num_heads=4, num_kv_heads=2)
    tables = make_tables(case["batch"], 2)
    assert (tables.tiles[:, 3] + tables.tiles[:, 5]).max() <= 32
    sizes = {"num_tokens": case["qkv"].shape[0], "num_tiles": tables.tiles.shape[0]}
    both = attended(case, tables, num_parts=2, **sizes)
    monkeypatch.setattr(attend_module, "add_parts", None)
    assert torch.equal(attended(case, tables, num_parts=1, **sizes), both)


def test_a_tree_of_64_drafts_uses_every_bit() -> None:
    parents = tuple(int(p) for p in np.maximum(np.arange(64) - 3, -1))
    case = random_case([Row(prefix=2, own=3, parents=parents)], num_heads=2, num_kv_heads=1)
    assert (case["batch"].tree_bits < 0).any()
    tables = make_tables(case["batch"], 2)
    out = attended(case, tables, num_parts=2, num_tokens=65, num_tiles=3)
    assert torch.allclose(out, expected_attention(case), rtol=0, atol=1e-5)


def test_the_highest_bit_is_one_slot_and_not_all_after_it() -> None:
    parents = tuple(range(-1, 63))
    row = Row(prefix=0, own=3, parents=parents)
    case = random_case([row, Row(prefix=0, own=1)], num_heads=1, num_kv_heads=1)
    batch = case["batch"]
    # Move the last token into the tree's tile, where it sees more of its span than the tree has.
    batch.own_start[-1], batch.prefix_start[-1], batch.num_own[-1] = batch.own_start[0], 0, 100
    pages = case["table"].numpy()[np.arange(batch.own_start[0], batch.own_start[0] + 100) // 16]
    case["slots_seen"][-1] = pages * 16 + np.arange(100) % 16
    tables = make_tables(batch, 1)
    assert tables.tiles.shape[0] == 2
    out = attended(case, tables, num_parts=1, num_tokens=66, num_tiles=2)
    assert torch.allclose(out, expected_attention(case), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_as_rounding_goes(dtype: torch.dtype) -> None:
    case = random_case(TREES, num_heads=4, num_kv_heads=2, head_size=16, dtype=dtype)
    out = attended(case, make_tables(case["batch"], 2), num_parts=2, num_tokens=12, num_tiles=4)
    assert out.dtype == dtype
    assert torch.allclose(out.float(), expected_attention(case), rtol=0, atol=2e-2)


def test_invisible_slots_do_not_matter_even_if_they_hold_nan() -> None:
    case = random_case(TREES, num_heads=2, num_kv_heads=1)
    seen = torch.zeros(case["keys"].shape[1], dtype=torch.bool)
    seen[torch.from_numpy(np.concatenate(case["slots_seen"]))] = True
    for values in (case["keys"], case["values"]):
        values[:, ~seen] = torch.nan
    tables = make_tables(case["batch"], 2)
    out = attended(case, tables, num_parts=2, num_tokens=12, num_tiles=3)
    assert torch.allclose(out, expected_attention(case), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("longest", "groups", "rows"), [(1, 4, 16), (4, 4, 16), (5, 4, 64), (1, 20, 64), (900, 1, 64)])
def test_tiles_are_as_large_as_the_longest_row_needs(longest: int, groups: int, rows: int) -> None:
    tables = make_tables(batch_of([Row(prefix=0, own=longest, num_fed=longest), Row(prefix=0, own=1)]), groups)
    assert tables.rows == rows
    assert tables.tiles[:, 1].max() <= rows // groups
    assert tables.tiles[:, 1].sum() == longest + 1


def test_buckets_are_few_and_never_too_small() -> None:
    buckets = [bucket(count) for count in range(1, 1025)]
    assert all(size >= count for count, size in enumerate(buckets, 1))
    assert len({*buckets}) == 7 + 15
    assert [bucket(count) for count in (1, 3, 64, 65, 130)] == [1, 4, 64, 128, 192]
