"""The processes that train one model together: sums over them, and facts that each tells the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from treering.arrays import Float64Array
from treering.errors import TreeringError

_TRANSPORTS = ("gloo", "nccl", "peer", "connection")
"""Words of the errors that torch raises, all as RuntimeError, where another process is gone."""


def num_ranks() -> int:
    """Processes that torch.distributed runs here; 1 where it runs none."""
    return dist.get_world_size() if is_running() else 1


def is_running() -> bool:
    """Whether torch.distributed has been initialised."""
    return dist.is_available() and dist.is_initialized()


def all_ranks() -> "RankGroup":
    """All processes as one group; this one alone without torch.distributed."""
    return RankGroup(rank=dist.get_rank(), size=dist.get_world_size()) if num_ranks() > 1 else RankGroup()


def is_of_another(error: BaseException) -> bool:
    """Whether an error says that another process of the group has ended.

    Example: true of `RuntimeError("Connection closed by peer")`, false of every error of Treering's own.
    """
    is_torchs = isinstance(error, RuntimeError) and not isinstance(error, TreeringError)
    return is_torchs and any(word in str(error).lower() for word in _TRANSPORTS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankGroup:
    """Data-parallel ranks. Every rank of the group calls the same methods in the same order.

    Attributes:
        rank: number of this process in the group.
        size: number of its processes.
        process_group: torch's group; None for all processes, or for one alone.
    """

    rank: int = 0
    size: int = 1
    process_group: Any = None

    def sum(self, values: Float64Array) -> Float64Array:
        """The sum of an array over the ranks, in float64."""
        if self.size == 1:
            return values
        total = torch.from_numpy(values.copy()).to(self._device)
        dist.all_reduce(total, group=self.process_group)
        summed: Float64Array = total.cpu().numpy()
        return summed

    def sum_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by its sum over the ranks, in its own dtype."""
        if self.size == 1:
            return
        works = [dist.all_reduce(tensor, group=self.process_group, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()

    def gather(self, fact: Any) -> list[Any]:
        """What every rank passed, by rank; any picklable value."""
        if self.size == 1:
            return [fact]
        facts: list[Any] = [None] * self.size
        dist.all_gather_object(facts, fact, group=self.process_group)
        return facts

    @property
    def _device(self) -> torch.device:
        """Where the group's collectives take tensors."""
        has_nccl = "nccl" in dist.get_backend(self.process_group)
        return torch.device("cuda", torch.cuda.current_device()) if has_nccl else torch.device("cpu")
