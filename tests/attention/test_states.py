"""Gateways of recurrent layers sum gradients in float32 or wider, give them once, and outlive the states."""

import numpy as np
import pytest
import torch

from tests.forests import SHAPES
from tests.partitions import random_partitions
from treering.attention import TreeLayout
from treering.attention.gateway import Boundary, Gateway, KeysValues, StateGateway, States, boundary_of
from treering.errors import StateError
from treering.tree.forest import Forest


def filled(dtype: torch.dtype = torch.float32) -> StateGateway:
    gateway = StateGateway()
    gateway.export(3, States(torch.ones(2, 4, dtype=dtype), torch.ones(2, 5, 3, dtype=dtype)))
    return gateway


def test_closing_a_layout_frees_keys_values_and_states() -> None:
    keys, states = Gateway(), filled()
    keys.export(3, KeysValues(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4)))
    nothing = np.empty(0, np.int64)
    boundary = Boundary(above=None, slots=nothing, start=np.array([-1, -1]), left=np.array([0, 1]), gateway=states)
    TreeLayout(Forest.from_sequences([[5, 6]]), torch.device("cpu"), gateway=keys, boundary=boundary).close()
    for gateway in (keys, states):
        with pytest.raises(StateError, match="layer 3 of an ancestor partition is missing"):
            gateway.read(3)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_root_of_a_partition_finds_its_parent_token_above(shape: str) -> None:
    tree = Forest.from_sequences(SHAPES[shape]).trees()[0]
    partitions = random_partitions(tree, 1, 12, cut=0.1)
    children = [
        [child for child, part in enumerate(partitions) if part.parent == number] for number in range(len(partitions))
    ]
    made = []
    for number, part in enumerate(partitions):
        above = made[part.parent] if part.parent >= 0 else None
        boundary = boundary_of(tree, partitions, number, children[number], above)
        made.append(boundary)
        assert (boundary.gateway is None) == (boundary.left.size == 0)
        assert np.array_equal(boundary.left, np.unique(boundary.left))
        for index, token in enumerate(part.tokens.tolist()):
            parent = int(tree.parent[token])
            if parent < 0 or parent in part.tokens:
                assert boundary.start[index] == -1
                continue
            assert above is not None
            assert boundary.above is above.gateway
            slot = boundary.slots[boundary.start[index]]
            assert partitions[part.parent].tokens[above.left[slot]] == parent
