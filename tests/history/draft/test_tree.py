"""A row's draft: candidates, their votes and features, and the tree built from them."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from numba import njit

from treering.history.draft.acceptance import Acceptance
from treering.history.draft.kernel import Output, write_row
from treering.history.draft.tree import (
    LENGTH_FACTORS,
    WORKSPACE,
    Model,
    Row,
    Texts,
    Workspace,
    count_votes,
    grow,
    sum_up,
    write_shares,
)
from treering.history.features import NUM_KINDS, NUM_LENGTHS, NUM_SOURCES, NUM_VOTES, stretch
from treering.history.match.matches import IN_RUNNING, MATCH
from treering.history.store.prompt_index import MARKER

NUM_MATCHES, DEPTH, NUM_POSITIONS = 9, 2, 64
BEGIN = 5
END = BEGIN + NUM_MATCHES
FIELDS = ("token", "count", "best", "length", "num_longest")
LASTS = (0, 1, 2, 3, 4, 6, 9, 14, 22, 40)


@njit
def count(texts: Any, matches: Any, workspace: Any, begin: int, end: int, depth: int, longest: int) -> Any:
    """Call the compiled count and shares from compiled code, the only way they support."""
    num = count_votes(texts, matches, workspace, begin, end, depth, longest)
    candidates = workspace.candidates
    total, num_longest = sum_up(candidates, num)
    shares = np.zeros((num, NUM_VOTES), np.float32)
    for c in range(num):
        write_shares(shares[c], candidates, c, num, candidates[c].votes / total, num_longest)
    return num, total, num_longest, shares


def stretched(part: float) -> float:
    """Return the value of a lookup table with 1,024 entries."""
    index = int(part * (1024 - 0.01))
    return float(stretch.py_func((index + 0.5) / 1024))


def node_of(draw: int, tokens: list[int]) -> tuple[Texts, np.ndarray]:
    """Return matches in random texts that continue with `tokens` at DEPTH."""
    rng = np.random.default_rng(draw)
    texts = Texts(*(np.full(NUM_POSITIONS, 77, np.int32) for _ in range(3)))
    matches = np.zeros(NUM_MATCHES, MATCH)
    matches["at"] = rng.permutation(NUM_POSITIONS - DEPTH)[:NUM_MATCHES]
    for field, end in (("source", NUM_SOURCES), ("text", 3), ("length", 60)):
        matches[field] = rng.integers(0, end, NUM_MATCHES)
    matches["length"][rng.integers(NUM_MATCHES)] = 60
    matches["weight"] = rng.random(NUM_MATCHES) + 0.1
    for match, token in zip(matches, tokens, strict=True):
        texts[match["text"]][match["at"] + DEPTH] = token
    return texts, matches


def workspace_of_all() -> Workspace:
    """Return a workspace whose members are all matches, preceded by matches of other nodes."""
    workspace = WORKSPACE.new()
    workspace.members[:BEGIN] = -1
    workspace.members[BEGIN:END] = np.arange(NUM_MATCHES)
    return workspace


def expected(matches: np.ndarray, tokens: list[int]) -> dict[int, dict[str, Any]]:
    """Compute the candidates by their tokens from the definition."""
    found: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for j, (match, token) in enumerate(zip(matches, tokens, strict=True)):
        bucket = sum(match["length"] + DEPTH > last for last in LASTS)
        factor = LENGTH_FACTORS[match["source"] * NUM_LENGTHS + bucket]
        if token != MARKER:
            found[token].append((j, match["weight"] * factor))
    return {
        token: {
            "token": token,
            "count": len(said),
            "best": max(said, key=lambda item: item[1])[0],
            "length": max(matches[j]["length"] for j, _ in said),
            "num_longest": sum(matches[j]["length"] == 60 for j, _ in said),
            "votes": sum(vote for _, vote in said),
            "by_source": [sum(vote for j, vote in said if matches[j]["source"] == k) for k in range(NUM_SOURCES)],
        }
        for token, said in found.items()
    }


@pytest.mark.parametrize("end", [5, MARKER, 6], ids=["all agree", "one ends", "one differs"])
@pytest.mark.parametrize("draw", range(8))
def test_candidates_and_their_shares_are_those_of_the_definition(draw: int, end: int) -> None:
    tokens = [5] * NUM_MATCHES
    tokens[draw % NUM_MATCHES] = end
    texts, matches = node_of(draw, tokens)
    workspace = workspace_of_all()
    num, total, num_longest, shares = count(texts, matches, workspace, BEGIN, END, DEPTH, 60)
    wanted = expected(matches, tokens)
    assert num == len(wanted)
    assert total == pytest.approx(sum(item["votes"] for item in wanted.values()))
    assert num_longest == sum(item["num_longest"] for item in wanted.values())
    for candidate, own in zip(workspace.candidates[:num], shares, strict=True):
        item = wanted[int(candidate["token"])]
        assert {name: candidate[name] for name in FIELDS} == {name: item[name] for name in FIELDS}
        assert candidate["votes"] == pytest.approx(item["votes"])
        assert own[0] == pytest.approx(stretched(item["votes"] / total))
        for k in range(NUM_SOURCES):
            whole = sum(other["by_source"][k] for other in wanted.values())
            part = (item["by_source"][k] / whole + 0.02) / 1.06 if whole > 0 else None
            assert own[1 + k] == pytest.approx(0.0 if part is None else stretched(part))
        assert own[-1] == pytest.approx(stretched((item["num_longest"] + 0.1) / (num_longest + 0.4)))


def test_a_node_without_matches_has_no_candidates() -> None:
    texts, matches = node_of(0, [5] * NUM_MATCHES)
    assert count(texts, matches, workspace_of_all(), BEGIN, BEGIN, DEPTH, 0)[:3] == (0, 0.0, 0)


SIZE, MOST, NONE = 300, 40, -9
WEIGHTS = Acceptance().weights


@njit
def grown(texts: Any, matches: Any, workspace: Any, num_matches: int, model: Any, row: Any) -> int:
    """Call the compiled growth from compiled code."""
    return grow(texts, matches, workspace, num_matches, model, row)[0]


@njit
def written(output: Any, at: int, workspace: Any, num_nodes: int) -> None:
    """Call the compiled writing from compiled code."""
    write_row(output, at, workspace, num_nodes)


def some_matches(rng: np.random.Generator, num_tokens: int, num_matches: int) -> tuple[Texts, np.ndarray]:
    """Return random texts of `num_tokens` distinct tokens, and matches in them."""
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
    """Return the indices of the matches whose texts continue with `path`."""
    return [k for k, match in enumerate(matches) if texts[match["text"]][match["at"] :][: len(path)].tolist() == path]


def path_of(workspace: Workspace, index: int) -> list[int]:
    """Return the tokens from the start of the draft to a node."""
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
def test_a_nodes_matches_are_those_that_continue_with_its_path(
    draw: int, least: float, num_tokens: int, is_chain: bool
) -> None:
    rng = np.random.default_rng((draw, num_tokens))
    texts, matches = some_matches(rng, num_tokens, [1, 7, 20, 64][draw])
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
def test_each_node_is_written_after_its_parent(draw: int) -> None:
    texts, matches = some_matches(np.random.default_rng(draw), 3, 20)
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
