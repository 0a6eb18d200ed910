"""Rows of a batch at the ranks that compute them, and their outputs back at the ranks that own them."""

import pickle
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from verl.utils import tensordict_utils as tu

from treering.arrays import Int32Array, Int64Array


class RowExchange:
    """Sends rows to the ranks of a plan, and outputs back.

    Every rank owns equally many rows, in order, and knows the whole plan. All ranks call each method together.
    """

    def __init__(self, rank_of_row: Int64Array, group: dist.ProcessGroup, device: Any) -> None:
        """`rank_of_row`: int64 [B], of the rows of all ranks; bytes go over `device`, which the group can send from."""
        self._group, self._device = group, device
        size, own = dist.get_world_size(group), dist.get_rank(group)
        by_owner = rank_of_row.reshape(size, -1)
        self._sent = [np.flatnonzero(by_owner[own] == rank).tolist() for rank in range(size)]
        """Own rows that each rank computes."""
        self._num_received = (by_owner == own).sum(1).tolist()
        """Rows of each rank that this one computes."""

    def there(self, data: Any) -> Any:
        """The rows that this rank computes, by owner, from the rows that it owns: a TensorDict for a TensorDict."""
        data = data.to("cpu")
        parts = [tu.index_select_tensor_dict(data, rows) if rows else None for rows in self._sent]
        return tu.concat_tensordict([part for part in self._swapped(parts) if part is not None])

    def back(self, outputs: dict[str, Any]) -> dict[str, Any]:
        """Outputs of the rows that this rank owns, in their order, from those that it computed: nested tensors."""
        ends = np.cumsum(self._num_received)
        rows = {name: [row.cpu() for row in value.unbind()] for name, value in outputs.items()}
        parts = [
            {name: values[end - count : end] for name, values in rows.items()}
            for count, end in zip(self._num_received, ends, strict=True)
        ]
        order = np.argsort(np.concatenate(self._sent))
        received = self._swapped(parts)
        joined = {name: [row for part in received for row in part[name]] for name in outputs}
        return {
            name: torch.nested.as_nested_tensor([values[i] for i in order], layout=torch.jagged)
            for name, values in joined.items()
        }

    def _swapped(self, parts: Sequence[Any]) -> list[Any]:
        """What each rank sends to this one, where it sends `parts[rank]` to each."""
        blobs = [torch.frombuffer(bytearray(pickle.dumps(part)), dtype=torch.uint8) for part in parts]
        sizes = torch.tensor([blob.numel() for blob in blobs], device=self._device)
        incoming = torch.empty_like(sizes)
        dist.all_to_all_single(incoming, sizes, group=self._group)
        counts = incoming.tolist()
        received = torch.empty(sum(counts), dtype=torch.uint8, device=self._device)
        dist.all_to_all_single(received, torch.cat(blobs).to(self._device), counts, sizes.tolist(), group=self._group)
        return [pickle.loads(blob.numpy().tobytes()) for blob in torch.split(received.cpu(), counts)]


def plan_exchange(
    own: tuple[Sequence[Int32Array], Sequence[Hashable]] | None, group: dist.ProcessGroup, device: Any
) -> RowExchange | None:
    """The exchange that makes groups whole, the same on all ranks; None if every row stays.

    Args:
        own: token ids and group of each row of this rank; None if it keeps its rows, as then all ranks do.
        group: of the ranks, which all call this together.
        device: see `RowExchange`.
    """
    from treering.integrations.verl.rank_shares import dealt_rows, share_rows
    from treering.tree.forest import Forest

    size = dist.get_world_size(group)
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, own, group=group)
    if None in gathered or len({len(rows) for rows, _ in gathered}) > 1:
        return None
    rows, groups = ([each for part in parts for each in part] for parts in zip(*gathered, strict=True))
    rank_of_row = share_rows(Forest.from_sequences(rows), groups, size)
    if (rank_of_row == dealt_rows(len(rows), size)).all():
        return None
    return RowExchange(rank_of_row, group, device)


def prompts_of(data: Any) -> list[Hashable]:
    """What groups rows: the prompt's tokens, and in supervised training nothing, so that each row is its own."""
    prompts = data.get("prompts", None)
    if prompts is None:
        return list(range(len(data)))
    return [row.cpu().numpy().tobytes() for row in prompts.unbind()]
