"""One row's draft: the tree of continuations of its places that is likeliest to be accepted, grown best first.

Knows candidates and estimates. Knows nothing of how places are found, or of other rows. A node's places are those that
have agreed with its path so far; their next tokens are its candidates.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treering.history.acceptance import estimate
from treering.history.candidates import CALIBRATED, Texts, Votes, count_votes, describe, token_at
from treering.history.features import NUM_SOURCES, crowd_bucket, length_bucket
from treering.history.lean import lean
from treering.history.places import Places
from treering.history.rooms import (
    MAX_CANDIDATES,
    MAX_NODES,
    MAX_WAITING,
    NUM_STRETCHES,
    Candidates,
    Nodes,
    Room,
    Waiting,
)

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]

_LEAST_SHARE = 0.01
_NUM_DOUBLED = 32
"""Tokens behind which the least probability has risen twice as far as in a straight line."""
_MEAN_SHARE = 0.02


class Model(NamedTuple):
    """How candidates are judged."""

    votes: Votes
    weights: Float32Array
    policy: int
    is_chain: bool
    """Whether a node has one child at most."""


class Row(NamedTuple):
    """What a draft is grown for."""

    state: int
    """See `features.NUM_STATES`."""
    token: int
    """The context's last one."""
    before: int
    """The one before that, -1 for none."""
    most: int
    """Nodes at most."""
    least: float
    """Probability of being reached and accepted that a first node has at least."""
    rise: float
    """How much more the nodes behind it have; see `least_behind`."""


@lean
def grow(texts: Texts, room: Room, num_places: int, model: Model, row: Row) -> int:
    """Fills the room's nodes with the draft of a row; returns how many there are. Parents stand before their children.

    Args:
        texts: of the places.
        room: with the row's places.
        num_places: how many.
        model: how candidates are judged.
        row: its state and what it may draft.
    """
    nodes, waiting = room.nodes, room.waiting
    paths = waiting.paths
    for i in range(num_places):
        nodes.members[MAX_NODES, i] = i
    nodes.num_members[MAX_NODES] = num_places
    node, num_nodes, num_waiting, num_described, path = -1, 0, 0, 0, 1.0
    token, before = row.token, row.before
    while True:
        num_waiting, num_described = _expand(
            texts, room, node, path, model, row, token, before, num_waiting, num_described
        )
        if num_waiting == 0 or num_nodes == row.most:
            return num_nodes
        best = 0
        for k in range(1, num_waiting):
            if paths[k] > paths[best]:
                best = k
        if paths[best] < least_behind(row.least, row.rise, num_nodes):
            return num_nodes
        node, parent = num_nodes, waiting.parents[best]
        _take(texts, room.places, nodes, node, waiting, best)
        num_nodes += 1
        if num_nodes == row.most:
            return num_nodes
        before = nodes.tokens[parent] if parent >= 0 else row.token
        path, token = paths[best], waiting.tokens[best]
        num_waiting -= 1
        _move(waiting, num_waiting, best)


@lean
def least_behind(least: float, rise: float, num_nodes: int) -> float:
    """The least probability that a token is drafted with behind so many others of its row.

    The first tokens of a draft ride along where a pass waits for weights; the more there are, the more each costs.

    Example: with a least probability of 0.02 and a rise of 0.0036 the ninth token has at least 0.056, the 33rd 0.25.
    """
    return least + rise * num_nodes * (1 + num_nodes / _NUM_DOUBLED)


@lean
def _expand(
    texts: Texts, room: Room, node: int, path: float, model: Model, row: Row, token: int, before: int,
    num_waiting: int, num_described: int,
) -> tuple[int, int]:  # fmt: skip
    """Adds a node's candidates that are likely enough to those that wait; returns how many wait and are described.

    `token` is the node's own and `before` its parent's.
    """
    places, nodes, waiting, candidates, described = (
        room.places, room.nodes, room.waiting, room.candidates, room.described
    )  # fmt: skip
    is_calibrated = model.policy == CALIBRATED
    line = node if node >= 0 else MAX_NODES
    depth = nodes.depths[node] + 1 if node >= 0 else 0
    members = nodes.members[line, : nodes.num_members[line]]
    length = places.length
    longest = 0
    for j in range(members.size):
        longest = max(longest, length[members[j]])
    num = count_votes(texts, places, members, depth, model.votes, model.policy, longest, candidates)
    sums = candidates.votes
    total, num_longest = _sum_up(candidates, num)
    all_votes = total + (model.votes.none[length_bucket(longest + depth)] if is_calibrated else 0.0)
    crowd = crowd_bucket(members.size)
    best_waiting, best_path = -1, 0.0
    for c in range(num):
        share = sums[c] / all_votes if all_votes > 0 else 0.0
        if share < _LEAST_SHARE or num_waiting == MAX_WAITING:
            continue
        rank = 0
        for other in range(num):
            rank += sums[other] > sums[c]
        if not is_calibrated and rank > 0:
            # The policy chooses; estimates only say how far it is followed.
            continue
        shares, features = described.shares[num_described], described.features[num_described]
        _write_shares(shares, candidates, c, share, num_longest, described.stretches)
        describe(features, places, candidates, c, depth, share, rank, row.state, crowd, token, before)
        chance = estimate(model.weights, shares, features)
        if path * chance < row.least or (model.is_chain and path * chance <= best_path):
            continue
        k = best_waiting if model.is_chain and best_waiting >= 0 else num_waiting
        waiting.tokens[k], waiting.parents[k] = candidates.tokens[c], node
        waiting.estimates[k], waiting.paths[k], waiting.described[k] = chance, path * chance, num_described
        num_described += 1
        best_waiting, best_path = k, path * chance
        num_waiting = max(num_waiting, k + 1)
    return num_waiting, num_described


@lean
def _sum_up(candidates: Candidates, num: int) -> tuple[float, int]:
    """All votes, and how many places have the longest match; by source they are written."""
    sums, num_longest_of, by_source = candidates.votes, candidates.num_longest, candidates.by_source
    total, num_longest = 0.0, 0
    for source in range(NUM_SOURCES):
        by_source[MAX_CANDIDATES, source] = 0.0
    for c in range(num):
        total += sums[c]
        num_longest += num_longest_of[c]
        for source in range(NUM_SOURCES):
            by_source[MAX_CANDIDATES, source] += by_source[c, source]
    return total, num_longest


@lean
def _write_shares(
    shares: Float32Array, candidates: Candidates, c: int, share: float, num_longest: int, stretches: Float64Array
) -> None:
    """A candidate's shares of the votes, stretched; see `features.NUM_VOTES`."""
    by_source = candidates.by_source
    most = NUM_STRETCHES - 0.01
    shares[0] = stretches[int(share * most)]
    for source in range(NUM_SOURCES):
        whole = by_source[MAX_CANDIDATES, source]
        shares[1 + source] = 0.0
        if whole > 0:
            part = (by_source[c, source] / whole + _MEAN_SHARE) / (1 + 3 * _MEAN_SHARE)
            shares[1 + source] = stretches[int(part * most)]
    part = (candidates.num_longest[c] + 0.1) / (num_longest + 0.4)
    shares[1 + NUM_SOURCES] = stretches[int(part * most)]


@lean
def _take(texts: Texts, places: Places, nodes: Nodes, node: int, waiting: Waiting, k: int) -> None:
    """Makes a waiting candidate a node, with those of its parent's places that have its token."""
    token, parent = waiting.tokens[k], waiting.parents[k]
    nodes.tokens[node], nodes.parents[node] = token, parent
    nodes.estimates[node], nodes.paths[node] = waiting.estimates[k], waiting.paths[k]
    nodes.described[node] = waiting.described[k]
    depth = nodes.depths[parent] + 1 if parent >= 0 else 0
    nodes.depths[node] = depth
    line = parent if parent >= 0 else MAX_NODES
    history, live, others = texts.history, texts.live, texts.others
    at, text, members = places.at, places.text, nodes.members
    num = 0
    for j in range(nodes.num_members[line]):
        i = members[line, j]
        if token_at(history, live, others, text[i], at[i] + depth) == token:
            members[node, num] = i
            num += 1
    nodes.num_members[node] = num


@lean
def _move(waiting: Waiting, source: int, target: int) -> None:
    waiting.tokens[target], waiting.parents[target] = waiting.tokens[source], waiting.parents[source]
    waiting.estimates[target], waiting.paths[target] = waiting.estimates[source], waiting.paths[source]
    waiting.described[target] = waiting.described[source]
