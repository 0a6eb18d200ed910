"""Partitions of trees with pictures: every token once, never over the budget, no picture in two of them."""

import numpy as np
import pytest

from tests.tree.plan.test_partition import sizes_and_chain
from treering.data.picture import Picture, PlacedPicture
from treering.errors import InputError
from treering.tree.forest import Forest
from treering.tree.pictures import picture_spans
from treering.tree.plan.partition import cut_tree
from treering.tree.plan.plan import plan_batch

PICTURES = [Picture(values=np.full((1, 2), n, np.float32), num_tokens=1 + n) for n in range(12)]


def random_tree(seed: int) -> Forest:
    """Some branches of one tree, each of text and pictures, that leave each other anywhere but inside a picture."""
    random = np.random.default_rng(seed)

    def parts(count: int) -> list[int | Picture]:
        return [
            PICTURES[random.integers(12)] if random.random() < 0.4 else int(random.integers(5)) for _ in range(count)
        ]

    branches = [[0, *parts(20)]]
    for _ in range(int(random.integers(1, 9))):
        above = branches[random.integers(len(branches))]
        branches.append(above[: random.integers(1, len(above) + 1)] + parts(int(random.integers(15))))
    tokens, placed = [], []
    for branch in branches:
        ids: list[int] = []
        own = []
        for part in branch:
            if isinstance(part, Picture):
                own.append(PlacedPicture(start=len(ids), picture=part))
            ids += [9] * part.num_tokens if isinstance(part, Picture) else [part]
        tokens.append(ids)
        placed.append(own)
    return Forest.from_sequences(tokens, pictures=placed)


@pytest.mark.parametrize("seed", range(25))
def test_no_budget_cuts_a_picture(seed: int) -> None:
    tree = random_tree(seed)
    largest = max((stop - start for start, stop in picture_spans(tree)), default=1)
    for budget in {largest, largest + 1, largest + 5, 2 * largest + 3, max(largest, tree.num_tokens // 3)}:
        partitions = cut_tree(tree, budget)
        sizes_and_chain(tree, partitions, budget)
        owner = np.empty(tree.num_tokens, int)
        for number, part in enumerate(partitions):
            owner[part.tokens] = number
        assert all(len(set(owner[start:stop])) == 1 for start, stop in picture_spans(tree))


def test_a_picture_over_the_budget_is_refused_and_a_faster_size_gives_way() -> None:
    placed = [PlacedPicture(start=0, picture=PICTURES[11])]
    tree = Forest.from_sequences([[9] * 12 + [1, 2, 3]], pictures=[placed])
    with pytest.raises(InputError, match="raise max_tokens to 12"):
        plan_batch([tree], 11)
    plan = plan_batch([tree], 14, cut_tokens=4)
    assert [part.num_tokens for part in plan.partitioned[0].partitions] in ([12, 3], [3, 12])
