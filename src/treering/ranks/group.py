"""The processes that train one model together: sums over them, exchange of facts, and agreement.

Ranks of a sharded model gather weights in every forward and backward: if one runs other passes than the rest, all wait
for each other forever. So before the first collective of a step, each rank sends what it will run, or the error that
stops it, and all raise the same error.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from treering.arrays import Float64Array
from treering.errors import StateError, TreeringError

BUCKET_BYTES = 100 * 2**20
"""Bytes summed over ranks at a time: a separate sum for each weight takes longer to start than to run."""

_TRANSPORTS = ("gloo", "nccl", "peer", "connection")
"""Words in torch's errors, all RuntimeError, when another process has ended."""


def num_ranks() -> int:
    """Return the number of processes that torch.distributed runs here, or 1 without it."""
    return dist.get_world_size() if is_running() else 1


def is_running() -> bool:
    """Return whether torch.distributed has been initialised."""
    return dist.is_available() and dist.is_initialized()


def all_ranks() -> "RankGroup":
    """Return all processes as one group; only this one without torch.distributed."""
    return RankGroup(rank=dist.get_rank(), size=dist.get_world_size()) if num_ranks() > 1 else RankGroup()


def is_of_another(error: BaseException) -> bool:
    """Return whether an error means that another process of the group has ended.

    Example: True for `RuntimeError("Connection closed by peer")`, False for every error of Treering itself.
    """
    is_torchs = isinstance(error, RuntimeError) and not isinstance(error, TreeringError)
    return is_torchs and any(word in str(error).lower() for word in _TRANSPORTS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankGroup:
    """Data-parallel ranks. Every rank of the group must call the same methods in the same order.

    Attributes:
        rank: index of this process in the group.
        size: number of processes.
        process_group: torch's group; None for all processes, or for a single one.
    """

    rank: int = 0
    size: int = 1
    process_group: Any = None

    def sum(self, values: Float64Array) -> Float64Array:
        """Return the sum of an array over the ranks, in float64."""
        if self.size == 1:
            return values
        total = torch.from_numpy(values.copy()).to(self._device)
        dist.all_reduce(total, group=self.process_group)
        summed: Float64Array = total.cpu().numpy()
        return summed

    def begin_sum(self, bucket: list[Tensor]) -> Callable[[], None]:
        """Begin to sum a bucket; return a function that waits, and replaces each tensor by its sum."""
        total = bucket[0] if len(bucket) == 1 else _flatten_dense_tensors(bucket)  # type: ignore[no-untyped-call]
        work = dist.all_reduce(total, group=self.process_group, async_op=True)

        def finish() -> None:
            work.wait()
            if len(bucket) > 1:
                torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(total, bucket)))  # type: ignore[no-untyped-call]

        return finish

    def gather(self, fact: Any) -> list[Any]:
        """Return what every rank passed, by rank; any picklable value."""
        if self.size == 1:
            return [fact]
        facts: list[Any] = [None] * self.size
        dist.all_gather_object(facts, fact, group=self.process_group)
        return facts

    @property
    def _device(self) -> torch.device:
        """Return the device of small sums: the host if the group has a backend there, as "cpu:gloo,cuda:nccl" has."""
        has_cpu = "cpu:" in dist.get_backend_config(self.process_group)
        return torch.device("cpu") if has_cpu else torch.device("cuda", torch.cuda.current_device())


def buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Split tensors, in order, into runs of one dtype and device of at most `BUCKET_BYTES`, or of one tensor.

    Example: with 100 MB, tensors of 60, 30, 20 and 200 MB form the buckets [60, 30], [20] and [200].
    """
    found: list[list[Tensor]] = []
    num_bytes = 0
    for tensor in tensors:
        is_alike = bool(found) and (found[-1][0].dtype, found[-1][0].device) == (tensor.dtype, tensor.device)
        if not is_alike or num_bytes + tensor.nbytes > BUCKET_BYTES:
            found.append([])
            num_bytes = 0
        found[-1].append(tensor)
        num_bytes += tensor.nbytes
    return found


@dataclass(slots=True, kw_only=True, eq=False)
class Agreement:
    """What a rank will run, and afterwards what all ranks agreed on.

    Attributes:
        what: facts that all ranks must share, such as the objective's name; set before the block ends.
        num_passes: forwards with a backward: of this rank, set before the block ends; afterwards the most of any rank,
            to which the others add empty ones. 0 if ranks may run different passes.
        max_tokens: tokens that this rank has room for; afterwards the fewest of any rank. 0 if not used.
    """

    what: str = ""
    num_passes: int = 0
    max_tokens: int = 0


@contextmanager
def agreeing(rank_group: RankGroup) -> Iterator[Agreement]:
    """Compare, at the end of the context, what the ranks will run; the checks of a step belong inside.

    Raises:
        StateError: on every rank, if one raised in its block, or they differ in more than the number of passes.

    Example: ranks with 2 and 3 passes agree on 3.
    """
    agreement = Agreement()
    try:
        yield agreement
    except TreeringError as error:
        rank_group.gather(str(error))
        raise
    facts = rank_group.gather((agreement.what, agreement.num_passes, agreement.max_tokens))
    for rank, fact in enumerate(facts):
        if isinstance(fact, str):
            raise StateError(f"ranks train one batch together, and rank {rank} refuses its share: {fact}")
        if fact[0] != facts[0][0]:
            raise StateError(
                f"ranks train one batch together, and rank 0 has {facts[0][0]} where rank {rank} has {fact[0]}; give "
                "all ranks the same objective and options"
            )
    agreement.num_passes = max(num_passes for _, num_passes, _ in facts)
    agreement.max_tokens = min(max_tokens for *_, max_tokens in facts)


def check_images_together(*, has_images: bool) -> None:
    """Refuse micro-batches of a sharded model if only some of them have images.

    Every rank of a sharded model must call this before a forward, because the vision tower's weights are gathered by
    all ranks or by none.

    Raises:
        StateError: on every rank; names a rank with images and one without.

    Example: two ranks with images are fine, and so are two without.
    """
    facts = all_ranks().gather(has_images)
    if len(set(facts)) > 1:
        raise StateError(
            f"ranks of a sharded model run its vision tower together, and rank {facts.index(True)} has images where "
            f"rank {facts.index(False)} has none; give every micro-batch an image, or train under DDP"
        )


def write_together(
    rank_group: RankGroup, make: Callable[[Callable[[], None]], None], write_own: Callable[[], None]
) -> None:
    """Write a folder together: all ranks call this, and it returns when all are done.

    Args:
        rank_group: the ranks.
        make: run by rank 0; must call its argument once the folder exists, and return when the folder is complete.
        write_own: writes a rank's own part, on all ranks at once, after that call.

    Raises:
        OSError: this rank could not write.
        StateError: this rank or another could not write.
    """
    has_started = False

    def begin() -> None:
        nonlocal has_started
        has_started = True
        if all(rank_group.gather(True)):
            write_own()

    problem: Exception | None = None
    try:
        if rank_group.rank == 0:
            make(begin)
        else:
            begin()
    except (OSError, StateError) as error:
        problem = error
        if not has_started:
            # The others wait to learn whether there is a folder.
            rank_group.gather(False)
    problems = [
        message for message in rank_group.gather(None if problem is None else str(problem)) if message is not None
    ]
    if problem is not None:
        raise problem
    if problems:
        raise StateError(f"ranks write a checkpoint together, and one could not: {problems[0]}")
