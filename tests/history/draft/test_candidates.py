"""The candidates of a node equal the next tokens of its matches, whether these agree on one token or not."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from numba import njit

from treering.history.draft.candidates import LENGTH_FACTORS, Texts, count_votes, sum_up, write_shares
from treering.history.draft.workspace import WORKSPACE, Workspace
from treering.history.features import NUM_LENGTHS, NUM_SOURCES, NUM_VOTES, stretch
from treering.history.match.matches import MATCH
from treering.history.store.prompt_index import MARKER

NUM_MATCHES, DEPTH, SIZE = 9, 2, 64
BEGIN = 5
END = BEGIN + NUM_MATCHES
FIELDS = ("token", "count", "best", "length", "num_longest")
LASTS = (0, 1, 2, 3, 4, 6, 9, 14, 22, 40)


@njit
def count(texts: Any, matches: Any, workspace: Any, begin: int, end: int, depth: int, longest: int) -> Any:
    """The compiled count and the candidates' shares, called from a compiled function as they are made for."""
    num = count_votes(texts, matches, workspace, begin, end, depth, longest)
    candidates = workspace.candidates
    total, num_longest = sum_up(candidates, num)
    shares = np.zeros((num, NUM_VOTES), np.float32)
    for c in range(num):
        write_shares(shares[c], candidates, c, num, candidates[c].votes / total, num_longest)
    return num, total, num_longest, shares


def stretched(part: float) -> float:
    """What stands in a table of 1,024 for it."""
    place = int(part * (1024 - 0.01))
    return float(stretch.py_func((place + 0.5) / 1024))


def node_of(draw: int, tokens: list[int]) -> tuple[Texts, np.ndarray]:
    """Matches that go on with these tokens two behind where they begin, in any of the texts."""
    rng = np.random.default_rng(draw)
    texts = Texts(*(np.full(SIZE, 77, np.int32) for _ in range(3)))
    matches = np.zeros(NUM_MATCHES, MATCH)
    matches["at"] = rng.permutation(SIZE - DEPTH)[:NUM_MATCHES]
    for field, end in (("source", NUM_SOURCES), ("text", 3), ("length", 60)):
        matches[field] = rng.integers(0, end, NUM_MATCHES)
    matches["length"][rng.integers(NUM_MATCHES)] = 60
    matches["weight"] = rng.random(NUM_MATCHES) + 0.1
    for place, token in zip(matches, tokens, strict=True):
        texts[place["text"]][place["at"] + DEPTH] = token
    return texts, matches


def workspace_of_all() -> Workspace:
    """Room with all places as members, behind some that are of other taken."""
    workspace = WORKSPACE.new()
    workspace.members[:BEGIN] = -1
    workspace.members[BEGIN:END] = np.arange(NUM_MATCHES)
    return workspace


def expected(matches: np.ndarray, tokens: list[int]) -> dict[int, dict[str, Any]]:
    """The candidates by their tokens, from the definition."""
    found: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for j, (place, token) in enumerate(zip(matches, tokens, strict=True)):
        bucket = sum(place["length"] + DEPTH > last for last in LASTS)
        factor = LENGTH_FACTORS[place["source"] * NUM_LENGTHS + bucket]
        if token != MARKER:
            found[token].append((j, place["weight"] * factor))
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


def test_a_node_without_places_has_no_candidates() -> None:
    texts, matches = node_of(0, [5] * NUM_MATCHES)
    assert count(texts, matches, workspace_of_all(), BEGIN, BEGIN, DEPTH, 0)[:3] == (0, 0.0, 0)
