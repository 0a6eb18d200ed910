"""Ranks compare what they are about to run before the first collective of a step, so that a difference is an error.

Ranks of a sharded model gather weights in every forward and backward: if one runs other passes than the rest, all wait
for each other forever. So each tells the others what it runs, or the error that stops it, and all raise alike.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from treering.errors import StateError, TreeringError
from treering.ranks.group import RankGroup, all_ranks


@dataclass(slots=True, kw_only=True, eq=False)
class Agreement:
    """What a rank will run, and then what all of them agreed on.

    Attributes:
        what: what ranks always have in common, such as the objective's name; set before the block ends.
        num_passes: forwards with a backward: of this rank, set before the block ends, and after it the most of any
            rank, to which the others add empty ones. 0 where ranks run what they like.
    """

    what: str = ""
    num_passes: int = 0


@contextmanager
def agreeing(group: RankGroup) -> Iterator[Agreement]:
    """Context manager around the checks of a step; at its end the ranks compare what they will run.

    Raises:
        StateError: on every rank, if one raised in its block, or they differ in more than a number of passes.

    Example: ranks with 2 and 3 passes agree on 3.
    """
    agreement = Agreement()
    try:
        yield agreement
    except TreeringError as error:
        group.gather(str(error))
        raise
    facts = group.gather((agreement.what, agreement.num_passes))
    for rank, fact in enumerate(facts):
        if isinstance(fact, str):
            raise StateError(f"ranks train one batch together, and rank {rank} refuses its share: {fact}")
        if fact[0] != facts[0][0]:
            raise StateError(
                f"ranks train one batch together, and rank 0 has {facts[0][0]} where rank {rank} has {fact[0]}: give "
                "all ranks the same objective and options"
            )
    agreement.num_passes = max(num_passes for _, num_passes in facts)


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
