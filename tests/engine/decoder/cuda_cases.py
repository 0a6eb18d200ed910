"""Passes over pages for the CUDA tests, with an explicit list of each token's visible slots."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from treering.engine.batch.token_batch import TokenBatch
from treering.engine.decoder.cuda.pages import PAGE_SLOTS

# Without triton, skip every test module that imports this file.
pytest.importorskip("triton")
INTERPRETED_ONLY = pytest.mark.skipif(
    not pytest.importorskip("treering.attention.triton_kernels").INTERPRETED,
    reason="the kernels are compiled here; test_gpu_engine holds them to the same laws",
)

APART = 128
"""Addresses from one row's prefix to the next row's; a row's own span starts half way."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Token counts of a row: shared prefix, committed own span, how many of these the pass computes, and drafts."""

    prefix: int
    own: int
    num_fed: int = 1
    parents: tuple[int, ...] = ()


def batch_of(rows: list[Row], vocab_size: int = 50) -> TokenBatch:
    """Return a batch of the rows' fed tokens and drafts that wants every token's logits."""
    rng = np.random.default_rng(0)
    columns: list[list[int]] = []
    for number, row in enumerate(rows):
        prefix_start = number * APART
        own_start = prefix_start + APART // 2
        for own in range(row.own - row.num_fed, row.own):
            columns.append([row.prefix + own, own_start + own, prefix_start, row.prefix, own_start, own + 1, 0, 0])
        for index in range(len(row.parents)):
            path = path_of(row.parents, index)
            bits = sum(1 << node for node in path)
            slot = own_start + row.own + index
            position = row.prefix + row.own + len(path) - 1
            signed = bits - 2**64 if bits >= 2**63 else bits
            columns.append([position, slot, prefix_start, row.prefix, own_start, row.own, own_start + row.own, signed])
    positions, slots, *spans = np.array(columns, np.int64).T.copy()
    tokens = rng.integers(0, vocab_size, positions.size)
    names = ("prefix_start", "num_prefix", "own_start", "num_own", "tree_start", "tree_bits")
    return TokenBatch(
        tokens=tokens,
        positions=positions,
        slots=slots,
        wanted=np.arange(positions.size),
        **dict(zip(names, spans, strict=True)),
    )


def path_of(parents: tuple[int, ...], node: int) -> list[int]:
    """Return a draft and its ancestors, deepest first."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path


def addresses_seen(rows: list[Row]) -> list[np.ndarray]:
    """Return the visible addresses of each token of `batch_of`."""
    seen = []
    for number, row in enumerate(rows):
        prefix = number * APART + np.arange(row.prefix)
        own = number * APART + APART // 2 + np.arange(row.own + len(row.parents))
        seen += [np.concatenate([prefix, own[: count + 1]]) for count in range(row.own - row.num_fed, row.own)]
        for index in range(len(row.parents)):
            drafts = own[row.own :][path_of(row.parents, index)]
            seen.append(np.concatenate([prefix, own[: row.own], drafts]))
    return seen


def random_case(
    rows: list[Row], *, num_heads: int, num_kv_heads: int, head_size: int = 16, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return queries, pages in random order, and the visible slots of each token."""
    generator = torch.Generator().manual_seed(1)
    batch = batch_of(rows)
    num_pages = (len(rows) + 1) * APART // PAGE_SLOTS
    table = torch.randperm(num_pages, generator=generator).to(torch.int32)
    keys, values = (
        torch.randn(num_kv_heads, num_pages * PAGE_SLOTS, head_size, generator=generator).to(dtype) for _ in range(2)
    )
    width = (num_heads + 2 * num_kv_heads) * head_size
    return {
        "batch": batch,
        "table": table,
        "keys": keys,
        "values": values,
        "qkv": torch.randn(batch.num_tokens, width, generator=generator).to(dtype),
        "num_heads": num_heads,
        "slots_seen": [
            table.numpy()[addresses // PAGE_SLOTS] * PAGE_SLOTS + addresses % PAGE_SLOTS
            for addresses in addresses_seen(rows)
        ],
    }


def expected_attention(case: dict[str, Any]) -> torch.Tensor:
    """Compute reference attention, float32 [T, H D], by a loop over tokens and heads."""
    keys, values = case["keys"].double(), case["values"].double()
    num_kv_heads, _, head_size = keys.shape
    groups = case["num_heads"] // num_kv_heads
    out = torch.zeros(case["qkv"].shape[0], case["num_heads"], head_size, dtype=torch.float64)
    queries = case["qkv"].double().view(out.shape[0], -1, head_size)
    for token, slots in enumerate(case["slots_seen"]):
        for head in range(case["num_heads"]):
            key, value = (cache[head // groups, torch.from_numpy(slots)] for cache in (keys, values))
            weights = (key @ queries[token, head] / head_size**0.5).softmax(0)
            out[token, head] = weights @ value
    return out.flatten(1).float()
