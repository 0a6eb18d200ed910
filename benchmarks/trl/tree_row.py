"""TRL's own prefix sharing, `TreeRow` of AsyncGRPO: what it gathers, how long it packs. Its attention needs a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common.timing import process_seconds
from treering.types import LossMask, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRowCounts:
    """Of one packed row or several."""

    num_tokens: int
    """Tokens that its decoder computes."""
    num_kv_rows: int
    """Rows of keys and values that each layer gathers, and each key is copied there once a segment below it."""
    pack_s: float


def pack(batches: Sequence[tuple[Sequence[TokenIds], Sequence[LossMask]]]) -> TreeRowCounts:
    """Packs each micro-batch into a row."""
    from trl.experimental.async_grpo.packing import TreeRow

    packed: list[Any] = []

    def run() -> None:
        for rows, masks in batches:
            row = TreeRow()
            for tokens, mask in zip(rows, masks, strict=True):
                row.add(_sample(tokens, mask))
            packed.append(row.pack())

    seconds = process_seconds(run)
    return TreeRowCounts(
        num_tokens=sum(each["input_ids"].numel() for each in packed),
        num_kv_rows=sum(each["tree_kv_index"].numel() for each in packed),
        pack_s=seconds,
    )


def _sample(tokens: TokenIds, mask: LossMask) -> dict[str, Any]:
    ids = torch.tensor(list(tokens))
    return {
        "input_ids": ids,
        "completion_mask": torch.tensor(list(mask)),
        "old_log_probs": torch.zeros(len(ids)),
        "advantage": 1.0,
        "group_id": 0,
    }
