"""Ranks compare what they are about to run before the first collective of a step, so that a difference is an error.

Ranks of a sharded model gather weights in every forward and backward: if one runs other passes than the rest, all wait
for each other forever. So each tells the others its passes, or the error that stops it, and all raise alike.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from treering.errors import StateError, TreeringError
from treering.ranks.group import RankGroup, all_ranks


class Passes(NamedTuple):
    """The passes of one rank's step.

    Attributes:
        what: what ranks always have in common, such as the objective's name.
        order: a word per forward and backward, in order; empty where ranks run what they like.
        can_pad: whether only the number of passes matters, so that empty ones may follow.
    """

    what: str
    order: tuple[str, ...] = ()
    can_pad: bool = True


@dataclass(slots=True, kw_only=True, eq=False)
class Agreement:
    """What a rank will run, and what all of them agreed on.

    Attributes:
        own: set before the block ends.
        num_passes: set after it; see `common_passes`.
    """

    own: Passes = field(default_factory=lambda: Passes(""))
    num_passes: int = 0


@contextmanager
def agreeing(group: RankGroup) -> Iterator[Agreement]:
    """Context manager around the checks of a step; at its end the ranks compare their passes.

    Raises:
        StateError: on every rank, if one raised in its block, or their passes differ.

    Example: ranks with 2 and 3 passes that can be padded agree on 3.
    """
    agreement = Agreement()
    try:
        yield agreement
    except TreeringError as error:
        group.gather(str(error))
        raise
    facts = group.gather(tuple(agreement.own))
    _raise_others(facts)
    agreement.num_passes = common_passes([Passes(*fact) for fact in facts])


def check_pictures_together(*, has_pictures: bool) -> None:
    """Refuses micro-batches of a sharded model of which some have pictures and some have none.

    Every rank of a sharded model calls this before a forward, because the tower's weights are gathered by all or by
    none.

    Raises:
        StateError: on every rank; names a rank with pictures and one without.

    Example: two ranks with pictures, and two without, are fine.
    """
    facts = all_ranks().gather(has_pictures)
    if len(set(facts)) > 1:
        raise StateError(
            f"ranks of a sharded model run its vision tower together, and rank {facts.index(True)} has pictures where "
            f"rank {facts.index(False)} has none: give every micro-batch a picture, or train under DDP"
        )


def common_passes(passes: Sequence[Passes]) -> int:
    """The most passes of a rank, to which the others add empty ones; 0 where all run one order.

    Raises:
        StateError: their passes differ in more than a number.

    Example: `common_passes([Passes("sft", ("train",)), Passes("sft", ("train", "train"))])` is 2.
    """
    first = passes[0]
    for rank, other in enumerate(passes):
        if other.what != first.what:
            raise StateError(
                f"ranks train one batch together, and rank 0 has {first.what} where rank {rank} has {other.what}: give "
                "all ranks the same objective and options"
            )
    if not all(one.can_pad for one in passes):
        _check_order(passes)
        return 0
    return max(len(one.order) for one in passes)


def _check_order(passes: Sequence[Passes]) -> None:
    first = passes[0].order
    for rank, other in enumerate(passes):
        if other.order != first:
            place = next((i for i, pair in enumerate(zip(first, other.order, strict=False)) if len(set(pair)) > 1), -1)
            place = min(len(first), len(other.order)) if place < 0 else place
            raise StateError(
                f'ranks="sharded" needs the same passes in the same order on all ranks, and rank 0 runs {len(first)} '
                f"({_word(first, place)} at place {place}) where rank {rank} runs {len(other.order)} "
                f'({_word(other.order, place)} there): use ranks="gathered", or raise max_tokens so that no tree is cut'
            )


def _word(order: Sequence[str], place: int) -> str:
    return order[place] if place < len(order) else "nothing"


def _raise_others(facts: Sequence[object]) -> None:
    for rank, fact in enumerate(facts):
        if isinstance(fact, str):
            raise StateError(f"ranks train one batch together, and rank {rank} refuses its share: {fact}")
