"""A draft grows along the places that it is from: a node's places are all those that go on as its path does."""

from typing import Any

import numpy as np
import pytest
from numba import njit

from treering.history.draft.acceptance import Acceptance
from treering.history.draft.candidates import Texts
from treering.history.draft.output import Output, write_row
from treering.history.draft.tree import Model, Row, grow
from treering.history.draft.workspace import Workspace, make_workspace
from treering.history.features import NUM_KINDS, NUM_SOURCES, NUM_VOTES
from treering.history.match.matches import IN_LIVE, PLACE
from treering.history.store.prompt_index import MARKER

SIZE, MOST, NONE = 300, 40, -9
WEIGHTS = Acceptance().weights, Acceptance().token_weights
SETTINGS = [(True, False), (True, True), (False, False)]


@njit
def grown(texts: Any, places: Any, room: Any, num_places: int, model: Any, row: Any) -> int:
    """The compiled growth, called from a compiled function as it is made for."""
    return grow(texts, places, room, num_places, model, row)


@njit
def written(output: Any, at: int, room: Any, num_nodes: int) -> None:
    """The compiled writing, likewise."""
    write_row(output, at, room, num_nodes)


def some_places(rng: np.random.Generator, num_tokens: int, num_places: int) -> tuple[Texts, np.ndarray]:
    """Places in rollouts of so many different tokens."""
    texts = Texts(*(rng.integers(0, num_tokens, SIZE).astype(np.int32) for _ in range(3)))
    for text in texts:
        text[rng.integers(0, SIZE, SIZE // 20)] = MARKER
        text[-1] = MARKER
    places = np.zeros(num_places, PLACE)
    places["at"] = rng.permutation(SIZE - 1)[:num_places]
    places["text"] = rng.integers(0, 3, num_places)
    places["source"] = rng.integers(0, NUM_SOURCES, num_places)
    places["length"] = rng.integers(1, 40, num_places)
    places["weight"] = rng.random(num_places) + 0.05
    return texts, places


def behind(texts: Texts, places: np.ndarray, path: list[int]) -> list[int]:
    """The places whose texts go on so, by number; a rollout that ended goes on with nothing."""
    return [k for k, place in enumerate(places) if texts[place["text"]][place["at"] :][: len(path)].tolist() == path]


def path_of(room: Workspace, node: int) -> list[int]:
    """The tokens from the beginning of the draft to a node."""
    tokens: list[int] = []
    while node >= 0:
        bud = room.buds[room.nodes[node]]
        tokens.append(int(bud["token"]))
        node = int(bud["parent"])
    return tokens[::-1]


@pytest.mark.parametrize(("is_calibrated", "is_chain"), SETTINGS, ids=["tree", "chain", "by frequency"])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 30])
@pytest.mark.parametrize("least", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("draw", range(4))
def test_a_nodes_places_are_those_that_go_on_as_its_path(
    draw: int, least: float, num_tokens: int, is_calibrated: bool, is_chain: bool
) -> None:
    rng = np.random.default_rng((draw, num_tokens))
    texts, places = some_places(rng, num_tokens, [1, 7, 20, 64][draw])
    model = Model(*WEIGHTS, is_calibrated, is_chain)
    room = make_workspace()
    room.buds["parent"] = NONE
    num_nodes = grown(texts, places, room, places.size, model, Row(0, 5, 6, MOST, least, 0.002))
    assert 0 <= num_nodes <= MOST
    for node in range(num_nodes):
        bud, path = room.buds[room.nodes[node]], path_of(room, node)
        assert bud["depth"] == len(path) - 1
        assert bud["path"] >= least
        assert room.members[bud["begin"] : bud["end"]].tolist() == behind(texts, places, path)
        if is_chain:
            assert bud["path"] == room.buds["path"][room.buds["parent"] == bud["parent"]].max()
    paths = [tuple(path_of(room, node)) for node in range(num_nodes)]
    assert len(set(paths)) == num_nodes
    if is_chain or not is_calibrated:
        assert [len(path) for path in paths] == list(range(1, num_nodes + 1))


def test_tokens_beyond_the_most_that_one_node_tells_apart_are_in_no_bud() -> None:
    num_places = 30
    texts = Texts(*(np.full(SIZE, MARKER, np.int32) for _ in range(3)))
    texts[IN_LIVE][: 2 * num_places : 2] = np.arange(num_places) + 100
    places = np.zeros(num_places, PLACE)
    places["text"], places["at"], places["length"], places["weight"] = IN_LIVE, 2 * np.arange(num_places), 5, 1.0
    model = Model(*WEIGHTS, True, False)
    room = make_workspace()
    num_nodes = grown(texts, places, room, num_places, model, Row(0, 5, 6, 64, 0.0, 0.0))
    assert sorted(path_of(room, node) for node in range(num_nodes)) == [[100 + k] for k in range(12)]
    for node in range(num_nodes):
        bud = room.buds[room.nodes[node]]
        assert room.members[bud["begin"] : bud["end"]].tolist() == [bud["token"] - 100]


@pytest.mark.parametrize("draw", range(4))
def test_what_is_known_of_each_node_is_written_behind_its_parent(draw: int) -> None:
    texts, places = some_places(np.random.default_rng(draw), 3, 20)
    model = Model(*WEIGHTS, True, False)
    room, at, size = make_workspace(), 7, 7 + MOST + 1
    num_nodes = grown(texts, places, room, places.size, model, Row(0, 5, 6, MOST, 0.01, 0.0))
    output = Output(
        np.zeros(2, np.int64), *np.full((2, size), -9, np.int32), np.zeros(size, np.float32), np.zeros(size),
        np.full((size, NUM_VOTES), -9, np.float32), np.full((size, NUM_KINDS), -9, np.int32), np.zeros(1, np.bool_),
    )  # fmt: skip
    written(output, at, room, num_nodes)
    assert (output.tokens[:at] == -9).all()
    assert (output.features[at + num_nodes :] == -9).all()
    numbers = room.numbers[1 : num_nodes + 1]
    assert sorted(numbers) == list(range(num_nodes))
    for node in range(num_nodes):
        bud, k = room.buds[room.nodes[node]], at + numbers[node]
        assert output.tokens[k] == bud["token"]
        assert output.estimates[k] == bud["estimate"]
        assert output.paths[k] == bud["path"]
        assert output.parents[k] == (numbers[bud["parent"]] if bud["parent"] >= 0 else -1)
        assert output.parents[k] < numbers[node]
        assert output.shares[k].tolist() == bud["shares"].tolist()
        assert output.features[k].tolist() == bud["features"].tolist()
