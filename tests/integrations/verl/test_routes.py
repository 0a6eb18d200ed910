"""Routed experts of a verl batch become routes of its rows; verl's zeros stand for no route."""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed: make verl-test", allow_module_level=True)

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from treering.errors import UnsupportedError
from treering.integrations.verl.verl_engine import routes_of

pytestmark = pytest.mark.filterwarnings("default")


def batch(routes: list[list[list[list[int]]]] | None, **flags: bool) -> TensorDict:
    rows = [[5, 6, 7], [5, 6]]
    fields = {"input_ids": torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)}
    if routes is not None:
        parts = [torch.tensor(own, dtype=torch.int16) for own in routes]
        fields["routed_experts"] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    data = TensorDict(fields, batch_size=[2])
    tu.assign_non_tensor(data, **flags)
    return data


def test_rows_get_their_routes_and_tokens_without_one_get_none() -> None:
    routes = [[[[0, 1], [0, 0]], [[2, 1], [3, 0]], [[0, 0], [0, 0]]], [[[1, 0], [2, 3]], [[0, 0], [0, 0]]]]
    found = routes_of(batch(routes))
    assert found is not None
    none = [[-1, -1], [-1, -1]]
    assert [own.tolist() for own in found] == [[routes[0][0], routes[0][1], none], [routes[1][0], none]]
    # With one expert per token, zeros are a route.
    one = [[[[0]], [[2]], [[0]]], [[[1]], [[0]]]]
    single = routes_of(batch(one))
    assert single is not None
    assert [own.tolist() for own in single] == one


def test_a_batch_says_whether_it_is_replayed() -> None:
    routes = [[[[0, 1]]] * 3, [[[0, 1]]] * 2]
    assert routes_of(batch(routes, enable_routing_replay=True)) is not None
    assert routes_of(batch(routes, enable_routing_replay=False)) is None
    assert routes_of(batch(None)) is None
    with pytest.raises(UnsupportedError, match="enable_rollout_routing_replay=True"):
        routes_of(batch(None, enable_routing_replay=True))
