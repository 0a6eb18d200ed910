"""Random partitions of a tree, drawn without the planner: any cut that the execution must handle."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal
from unittest import mock

import numpy as np

from treering.train.memory import ParentsChoice
from treering.tree.forest import Forest
from treering.tree.partition import Partition

Parents = Literal["keep", "recompute"]


def random_partitions(tree: Forest, seed: int, max_tokens: int = 8, cut: float = 0.15) -> tuple[Partition, ...]:
    """Draw token by token: stay in the parent token's partition, or cut and join a sibling or open a new one."""
    rng = random.Random(seed)
    members: list[list[int]] = []
    parents: list[int] = []
    home: list[int] = []
    for token in range(tree.num_tokens):
        above = int(tree.parent[token])
        parent = home[above] if above >= 0 else -1
        if parent >= 0 and len(members[parent]) < max_tokens and rng.random() > cut:
            number = parent
        else:
            siblings = [i for i in range(len(members)) if parents[i] == parent >= 0 and len(members[i]) < max_tokens]
            number = rng.choice(siblings) if siblings and rng.random() < 0.6 else len(members)
        if number == len(members):
            members.append([])
            parents.append(parent)
        members[number].append(token)
        home.append(number)
    return tuple(
        Partition(tokens=np.array(tokens, np.int32), parent=parent)
        for tokens, parent in zip(members, parents, strict=True)
    )


def chain_partitions(num_tokens: int, size: int) -> tuple[Partition, ...]:
    """Cut a chain into pieces of `size` tokens."""
    return tuple(
        Partition(tokens=np.arange(start, min(start + size, num_tokens), dtype=np.int32), parent=start // size - 1)
        for start in range(0, num_tokens, size)
    )


@contextmanager
def forced(parents: Parents) -> Iterator[None]:
    """Inside the block, activations of partitions are kept or recomputed, regardless of free memory."""
    with mock.patch(
        "treering.train.step.choose_parents", return_value=ParentsChoice(keeps=parents == "keep", reason="")
    ):
        yield
