"""A draft grows along its matches: the matches of a node are all those that continue as its path does."""

from typing import Any

import numpy as np
import pytest
from numba import njit

from treering.history.draft.acceptance import Acceptance
from treering.history.draft.candidates import Texts
from treering.history.draft.output import Output, write_row
from treering.history.draft.tree import Model, Row, grow
from treering.history.draft.workspace import WORKSPACE, Workspace
from treering.history.features import NUM_KINDS, NUM_SOURCES, NUM_VOTES
from treering.history.match.matches import IN_RUNNING, MATCH
from treering.history.store.prompt_index import MARKER

SIZE, MOST, NONE = 300, 40, -9
WEIGHTS = Acceptance().weights


@njit
def grown(texts: Any, matches: Any, workspace: Any, num_matches: int, model: Any, row: Any) -> int:
    """The compiled growth, called from a compiled function as it is made for."""
    return grow(texts, matches, workspace, num_matches, model, row)[0]


@njit
def written(output: Any, at: int, workspace: Any, num_nodes: int) -> None:
    """The compiled writing, likewise."""
    write_row(output, at, workspace, num_nodes)


def some_places(rng: np.random.Generator, num_tokens: int, num_matches: int) -> tuple[Texts, np.ndarray]:
    """Matches in rollouts of so many different tokens."""
    texts = Texts(*(rng.integers(0, num_tokens, SIZE).astype(np.int32) for _ in range(3)))
    for text in texts:
        text[rng.integers(0, SIZE, SIZE // 20)] = MARKER
        text[-1] = MARKER
    matches = np.zeros(num_matches, MATCH)
    matches["at"] = rng.permutation(SIZE - 1)[:num_matches]
    matches["text"] = rng.integers(0, 3, num_matches)
    matches["source"] = rng.integers(0, NUM_SOURCES, num_matches)
    matches["length"] = rng.integers(1, 40, num_matches)
    matches["weight"] = rng.random(num_matches) + 0.05
    return texts, matches


def behind(texts: Texts, matches: np.ndarray, path: list[int]) -> list[int]:
    """The places whose texts go on so, by number; a rollout that ended goes on with nothing."""
    return [k for k, place in enumerate(matches) if texts[place["text"]][place["at"] :][: len(path)].tolist() == path]


def path_of(workspace: Workspace, index: int) -> list[int]:
    """The tokens from the beginning of the draft to a index."""
    tokens: list[int] = []
    while index >= 0:
        node = workspace.nodes[workspace.taken[index]]
        tokens.append(int(node["token"]))
        index = int(node["parent"])
    return tokens[::-1]


@pytest.mark.parametrize("is_chain", [False, True], ids=["tree", "chain"])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 30])
@pytest.mark.parametrize("least", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("draw", range(4))
def test_a_nodes_places_are_those_that_go_on_as_its_path(
    draw: int, least: float, num_tokens: int, is_chain: bool
) -> None:
    rng = np.random.default_rng((draw, num_tokens))
    texts, matches = some_places(rng, num_tokens, [1, 7, 20, 64][draw])
    model = Model(WEIGHTS, is_chain)
    workspace = WORKSPACE.new()
    workspace.nodes["parent"] = NONE
    num_nodes = grown(texts, matches, workspace, matches.size, model, Row(0, 5, 6, MOST, least, 0.002))
    assert 0 <= num_nodes <= MOST
    for index in range(num_nodes):
        node, path = workspace.nodes[workspace.taken[index]], path_of(workspace, index)
        assert node["depth"] == len(path) - 1
        assert node["path"] >= least
        assert workspace.members[node["begin"] : node["end"]].tolist() == behind(texts, matches, path)
        if is_chain:
            assert node["path"] == workspace.nodes["path"][workspace.nodes["parent"] == node["parent"]].max()
    paths = [tuple(path_of(workspace, index)) for index in range(num_nodes)]
    assert len(set(paths)) == num_nodes
    if is_chain:
        assert [len(path) for path in paths] == list(range(1, num_nodes + 1))


def test_tokens_beyond_the_most_that_one_node_tells_apart_are_in_no_bud() -> None:
    num_matches = 30
    texts = Texts(*(np.full(SIZE, MARKER, np.int32) for _ in range(3)))
    texts[IN_RUNNING][: 2 * num_matches : 2] = np.arange(num_matches) + 100
    matches = np.zeros(num_matches, MATCH)
    matches["text"], matches["at"], matches["length"], matches["weight"] = (
        IN_RUNNING,
        2 * np.arange(num_matches),
        5,
        1.0,
    )
    model = Model(WEIGHTS, False)
    workspace = WORKSPACE.new()
    num_nodes = grown(texts, matches, workspace, num_matches, model, Row(0, 5, 6, 64, 0.0, 0.0))
    assert sorted(path_of(workspace, index) for index in range(num_nodes)) == [[100 + k] for k in range(12)]
    for index in range(num_nodes):
        node = workspace.nodes[workspace.taken[index]]
        assert workspace.members[node["begin"] : node["end"]].tolist() == [node["token"] - 100]


@pytest.mark.parametrize("draw", range(4))
def test_what_is_known_of_each_node_is_written_behind_its_parent(draw: int) -> None:
    texts, matches = some_places(np.random.default_rng(draw), 3, 20)
    model = Model(WEIGHTS, False)
    workspace, at, size = WORKSPACE.new(), 7, 7 + MOST + 1
    num_nodes = grown(texts, matches, workspace, matches.size, model, Row(0, 5, 6, MOST, 0.01, 0.0))
    output = Output(
        np.zeros(2, np.int64), *np.full((2, size), -9, np.int32), np.zeros(size, np.float32), np.zeros(size),
        np.full((size, NUM_VOTES), -9, np.float32), np.full((size, NUM_KINDS), -9, np.int32), np.zeros(1, np.bool_),
    )  # fmt: skip
    written(output, at, workspace, num_nodes)
    assert (output.tokens[:at] == -9).all()
    assert (output.features[at + num_nodes :] == -9).all()
    numbers = workspace.numbers[1 : num_nodes + 1]
    assert sorted(numbers) == list(range(num_nodes))
    for index in range(num_nodes):
        node, k = workspace.nodes[workspace.taken[index]], at + numbers[index]
        assert output.tokens[k] == node["token"]
        assert output.estimates[k] == node["estimate"]
        assert output.paths[k] == node["path"]
        assert output.parents[k] == (numbers[node["parent"]] if node["parent"] >= 0 else -1)
        assert output.parents[k] < numbers[index]
        assert output.shares[k].tolist() == node["shares"].tolist()
        assert output.features[k].tolist() == node["features"].tolist()
