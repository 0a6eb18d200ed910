"""Law 4, planning: each token is in one partition within the budget, and the partitions form a tree."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.forests import SHAPES, comb, sequence_sets, star
from treering.data.image import ImageData, PlacedImage
from treering.errors import InputError
from treering.tree.forest import Forest
from treering.tree.image_tokens import image_spans
from treering.tree.partition import Partition, cut_tree
from treering.tree.plan import plan_batch


def sizes_and_chain(tree: Forest, parts: tuple[Partition, ...], budget: int) -> tuple[list[int], int]:
    """Check the laws token by token; return the sizes, and the tokens of the longest chain of partitions."""
    home = {}
    for number, part in enumerate(parts):
        assert 1 <= part.tokens.size <= budget
        assert part.tokens.dtype == np.int32
        assert part.tokens.tolist() == sorted(set(part.tokens.tolist()))
        assert (part.parent == -1) if number == 0 else (0 <= part.parent < number)
        for token in part.tokens.tolist():
            assert token not in home
            home[token] = number
    assert sorted(home) == list(range(tree.num_tokens))
    for token, above in enumerate(tree.parent.tolist()):
        if above >= 0 and home[token] != home[above]:
            assert parts[home[token]].parent == home[above]
    assert home[0] == 0
    depth: list[int] = []
    for part in parts:
        depth.append(part.tokens.size + (depth[part.parent] if part.parent >= 0 else 0))
    return [part.tokens.size for part in parts], max(depth)


def fewest_and_shortest(parent: list[int], budget: int) -> tuple[int, int]:
    """Return the fewest partitions and their shortest longest chain, over every way to place single tokens."""
    best = (len(parent) + 1, 0)

    def put(token: int, home: list[int], size: list[int], above: list[int]) -> None:
        nonlocal best
        if len(size) > best[0]:
            return
        if token == len(parent):
            depth: list[int] = []
            for own, top in zip(size, above, strict=True):
                depth.append(own + (depth[top] if top >= 0 else 0))
            best = min(best, (len(size), max(depth)))
            return
        under = home[parent[token]] if token else -1
        allowed = [i for i in range(len(size)) if size[i] < budget and token and (i == under or above[i] == under)]
        for number in allowed:
            size[number] += 1
            put(token + 1, [*home, number], size, above)
            size[number] -= 1
        put(token + 1, [*home, len(size)], [*size, 1], [*above, under])

    put(0, [], [], [])
    return best


def random_tree(seed: int, num_tokens: int, alphabet: int = 5) -> Forest:
    rng = random.Random(seed)
    sequences = [[0] * rng.randint(1, 4)]
    while True:
        kept = rng.choice(sequences)
        grown = kept[: rng.randint(1, len(kept))] + [rng.randrange(alphabet) for _ in range(rng.randint(1, 4))]
        tree = Forest.from_sequences([*sequences, grown])
        if tree.num_tokens > num_tokens:
            return Forest.from_sequences(sequences)
        sequences.append(grown)


@given(sequence_sets(), st.integers(1, 30))
def test_partitions_of_random_trees_keep_the_laws(sequences: list[list[int]], budget: int) -> None:
    for tree in Forest.from_sequences(sequences).trees():
        parts = cut_tree(tree, budget)
        sizes_and_chain(tree, parts, budget)
        if tree.num_tokens <= budget:
            assert len(parts) == 1


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_partitions_of_every_shape_keep_the_laws(name: str, budget: int) -> None:
    for tree in Forest.from_sequences(SHAPES[name]).trees():
        sizes, _ = sizes_and_chain(tree, cut_tree(tree, budget), budget)
        assert len(sizes) >= -(-tree.num_tokens // budget)


def test_a_chain_of_ten_budgets_is_ten_full_partitions_in_a_row() -> None:
    tree = Forest.from_sequences([list(range(1000))])
    parts = cut_tree(tree, 100)
    assert [part.parent for part in parts] == list(range(-1, 9))
    assert [part.tokens.tolist() for part in parts] == [list(range(i, i + 100)) for i in range(0, 1000, 100)]


def test_children_of_a_star_and_of_a_caterpillar_are_put_together() -> None:
    caterpillar = Forest.from_sequences(comb(1000))
    assert len(sizes_and_chain(caterpillar, cut_tree(caterpillar, 100), 100)[0]) == 20  # 2,000 tokens
    tree = Forest.from_sequences(star(1000, prompt=40, response=5))
    sizes, chain = sizes_and_chain(tree, cut_tree(tree, 200), 200)
    assert sizes == [40] + [200] * 25  # 26 for 5,040 tokens; children next to the prompt would lengthen the chain
    assert chain == 240


def test_a_large_star_keeps_only_its_prompt_next_to_its_responses() -> None:
    tree = Forest.from_sequences(star(32, prompt=66, response=62))
    sizes, chain = sizes_and_chain(tree, cut_tree(tree, 512), 512)
    assert (sizes, chain) == ([66, 496, 496, 496, 496], 66 + 496)


def test_a_cut_falls_inside_a_segment_and_what_hangs_off_one_partition_fills_another() -> None:
    # With a root of 2, two children of 3 and a budget of 4, cuts at forks would give three partitions.
    tree = Forest.from_sequences([[9, 9, 1, 1, 1], [9, 9, 2, 2, 2]])
    sizes, chain = sizes_and_chain(tree, cut_tree(tree, 4), 4)
    assert (sizes, chain) == ([4, 4], 8)


@pytest.mark.parametrize("seed", range(20))
def test_small_trees_get_the_fewest_partitions_there_can_be(seed: int) -> None:
    tree = random_tree(seed, num_tokens=11)
    for budget in range(2, tree.num_tokens):
        fewest, shortest = fewest_and_shortest(tree.parent.tolist(), budget)
        sizes, chain = sizes_and_chain(tree, cut_tree(tree, budget), budget)
        assert len(sizes) == fewest
        assert chain <= 1.7 * shortest


def test_large_trees_stay_near_the_fewest_partitions() -> None:
    for seed in range(6):
        tree = random_tree(seed, num_tokens=600, alphabet=50)
        for budget in (20, 60, 100):
            sizes, _ = sizes_and_chain(tree, cut_tree(tree, budget), budget)
            assert len(sizes) <= 1.1 * -(-tree.num_tokens // budget) + 1


def test_only_one_tree_is_cut_and_only_to_a_budget() -> None:
    with pytest.raises(InputError, match="forest of 2"):
        cut_tree(Forest.from_sequences([[1], [2]]), 4)
    with pytest.raises(InputError, match="at least 1, got 0"):
        cut_tree(Forest.from_sequences([[1]]), 0)


IMAGES = [ImageData(values=np.full((1, 2), n, np.float32), num_tokens=1 + n) for n in range(12)]


def tree_of_images(seed: int) -> Forest:
    """Return a tree of branches of text and images that fork anywhere except inside an image."""
    rng = np.random.default_rng(seed)

    def parts(count: int) -> list[int | ImageData]:
        return [IMAGES[rng.integers(12)] if rng.random() < 0.4 else int(rng.integers(5)) for _ in range(count)]

    branches = [[0, *parts(20)]]
    for _ in range(int(rng.integers(1, 9))):
        above = branches[rng.integers(len(branches))]
        branches.append(above[: rng.integers(1, len(above) + 1)] + parts(int(rng.integers(15))))
    tokens, placed = [], []
    for branch in branches:
        ids: list[int] = []
        own = []
        for part in branch:
            if isinstance(part, ImageData):
                own.append(PlacedImage(start=len(ids), image=part))
            ids += [9] * part.num_tokens if isinstance(part, ImageData) else [part]
        tokens.append(ids)
        placed.append(own)
    return Forest.from_sequences(tokens, images=placed)


@pytest.mark.parametrize("seed", range(25))
def test_no_budget_cuts_a_image(seed: int) -> None:
    tree = tree_of_images(seed)
    largest = max((stop - start for start, stop in image_spans(tree)), default=1)
    for budget in {largest, largest + 1, largest + 5, 2 * largest + 3, max(largest, tree.num_tokens // 3)}:
        partitions = cut_tree(tree, budget)
        sizes_and_chain(tree, partitions, budget)
        owner = np.empty(tree.num_tokens, int)
        for number, part in enumerate(partitions):
            owner[part.tokens] = number
        assert all(len(set(owner[start:stop])) == 1 for start, stop in image_spans(tree))


def test_a_image_over_the_budget_is_refused_and_a_faster_size_gives_way() -> None:
    placed = [PlacedImage(start=0, image=IMAGES[11])]
    tree = Forest.from_sequences([[9] * 12 + [1, 2, 3]], images=[placed])
    with pytest.raises(InputError, match="raise max_tokens to at least 12"):
        plan_batch([tree], 11)
    plan = plan_batch([tree], 14, cut_tokens=4)
    assert [part.num_tokens for part in plan.partitioned[0].partitions] in ([12, 3], [3, 12])
