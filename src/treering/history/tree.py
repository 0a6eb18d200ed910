"""One row's draft: the tree of continuations of its places that is likeliest to be accepted, grown best first.

Knows candidates and estimates. Knows nothing of how places are found, or of other rows. A node's places are those that
have agreed with its path so far; their next tokens are its candidates.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treering.history.acceptance import estimate
from treering.history.candidates import CALIBRATED, Facts, Texts, Votes, count_votes, describe
from treering.history.features import NUM_FINE_SHARES, length_bucket
from treering.history.lean import lean
from treering.history.places import Places
from treering.history.rooms import MAX_WAITING, Nodes, Room, Waiting
from treering.history.shares import sum_up, write_shares

Float32Array = NDArray[np.float32]

_LEAST_SHARE = 0.01
_NUM_DOUBLED = 32
"""Tokens behind which the least probability has risen twice as far as in a straight line."""


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


class Grown(NamedTuple):
    """What a row's rooms hold so far."""

    num_waiting: int
    num_described: int
    num_members: int


@lean
def grow(texts: Texts, places: Places, room: Room, num_places: int, model: Model, row: Row) -> int:
    """Fills the room's nodes with the draft of a row; returns how many there are. Parents stand before their children.

    Args:
        texts: of the places.
        places: of the row.
        room: written over.
        num_places: how many places.
        model: how candidates are judged.
        row: its state and what it may draft.
    """
    nodes, waiting, begins, ends = room.nodes, room.waiting, room.described.begins, room.described.ends
    paths = waiting.paths
    for i in range(num_places):
        nodes.members[i] = i
    node, num_nodes, path = -1, 0, 1.0
    so_far = Grown(0, 0, num_places)
    begin, end = 0, num_places
    token, before, least = row.token, row.before, row.least
    while True:
        # What is below the least probability now is so for ever: it rises with the nodes.
        if path >= least:
            so_far = _expand(texts, places, room, node, begin, end, path, least, model, row, token, before, so_far)
        if so_far.num_waiting == 0 or num_nodes == row.most:
            return num_nodes
        best, path = 0, paths[0]
        for k in range(1, so_far.num_waiting):
            if paths[k] > path:
                best, path = k, paths[k]
        if path < least:
            return num_nodes
        node, parent = num_nodes, waiting.parents[best]
        _take(nodes, node, waiting, np.uintp(best))
        num_nodes += 1
        if num_nodes == row.most:
            return num_nodes
        least = least_behind(row.least, row.rise, num_nodes)
        before = nodes.tokens[parent] if parent >= 0 else row.token
        token = nodes.tokens[node]
        begin, end = begins[nodes.described[node]], ends[nodes.described[node]]
        so_far = Grown(so_far.num_waiting - 1, so_far.num_described, so_far.num_members)
        _move(waiting, np.uintp(so_far.num_waiting), np.uintp(best))


@lean
def least_behind(least: float, rise: float, num_nodes: int) -> float:
    """The least probability that a token is drafted with behind so many others of its row.

    The first tokens of a draft ride along where a pass waits for weights; the more there are, the more each costs.

    Example: with a least probability of 0.02 and a rise of 0.0036 the ninth token has at least 0.056, the 33rd 0.25.
    """
    return least + rise * num_nodes * (1 + num_nodes / _NUM_DOUBLED)


@lean
def _expand(
    texts: Texts, places: Places, room: Room, node: int, begin: int, end: int, path: float, least: float, model: Model,
    row: Row, token: int, before: int, so_far: Grown,
) -> Grown:  # fmt: skip
    """Adds a node's candidates that are likely enough to those that wait.

    The node's places are those from `begin` to `end` of the members, `token` is its own and `before` its parent's.
    """
    nodes, waiting, candidates, described = room.nodes, room.waiting, room.candidates, room.described
    num_waiting, num_described, num_members = so_far
    is_calibrated = model.policy == CALIBRATED
    depth = nodes.depths[node] + 1 if node >= 0 else 0
    members = nodes.members[begin:end]
    length = places.length
    longest = 0
    for j in range(members.size):
        longest = max(longest, length[np.uintp(members[j])])
    num = count_votes(texts, places, members, depth, model.votes, model.policy, longest, candidates)
    sums, lines = candidates.votes, candidates.lines
    total, num_longest = sum_up(candidates, num)
    all_votes = total + (model.votes.none[length_bucket(longest + depth)] if is_calibrated else 0.0)
    best_waiting, best_path = -1, 0.0
    for c in range(num):
        lines[c] = -1
        share = sums[c] / all_votes if all_votes > 0 else 0.0
        if share < _LEAST_SHARE or num_waiting == MAX_WAITING:
            continue
        rank = 0
        for other in range(num):
            rank += sums[other] > sums[c]
        if not is_calibrated and rank > 0:
            # The policy chooses; estimates only say how far it is followed.
            continue
        line = np.uintp(num_described)
        shares, features = described.shares[line], described.features[line]
        write_shares(shares, candidates, c, share, num_longest)
        facts = Facts(
            candidates.best[c], candidates.length[c] + depth, candidates.counts[c],
            min(int(share * NUM_FINE_SHARES), NUM_FINE_SHARES - 1), rank, members.size, candidates.num_longest[c],
            num_longest, num,
        )  # fmt: skip
        describe(features, places, facts, depth, candidates.tokens[c], row.state, token, before)
        chance = estimate(model.weights, shares, features)
        if path * chance < least or (model.is_chain and path * chance <= best_path):
            continue
        k = best_waiting if model.is_chain and best_waiting >= 0 else num_waiting
        _wait(waiting, np.uintp(k), candidates.tokens[c], node, chance, path * chance, num_described)
        lines[c] = num_described
        num_described += 1
        best_waiting, best_path = k, path * chance
        num_waiting = max(num_waiting, k + 1)
    return Grown(num_waiting, num_described, _part(room, begin, end, num, num_members))


@lean
def _part(room: Room, begin: int, end: int, num: int, num_members: int) -> int:
    """Puts the places of each candidate that waits side by side; returns how many members there are then."""
    candidates, begins, ends, members = room.candidates, room.described.begins, room.described.ends, room.nodes.members
    lines, which = candidates.lines, candidates.which
    if num == 1 and candidates.counts[0] == end - begin:
        if lines[0] >= 0:
            begins[lines[0]], ends[lines[0]] = begin, end
        return num_members
    for c in range(num):
        if lines[c] >= 0:
            begins[lines[c]] = ends[lines[c]] = num_members
            num_members += candidates.counts[c]
    own = members[begin:end]
    for j in range(own.size):
        line = lines[which[j]] if which[j] >= 0 else -1
        if line >= 0:
            members[ends[line]] = own[j]
            ends[line] += 1
    return num_members


@lean
def _wait(waiting: Waiting, k: int, token: int, parent: int, chance: float, path: float, line: int) -> None:
    """Writes a candidate to those that wait."""
    waiting.tokens[k], waiting.parents[k] = token, parent
    waiting.estimates[k], waiting.paths[k], waiting.described[k] = chance, path, line


@lean
def _take(nodes: Nodes, node: int, waiting: Waiting, k: int) -> None:
    """Makes a waiting candidate a node."""
    parent = waiting.parents[k]
    nodes.tokens[node], nodes.parents[node] = waiting.tokens[k], parent
    nodes.estimates[node], nodes.paths[node] = waiting.estimates[k], waiting.paths[k]
    nodes.described[node] = waiting.described[k]
    nodes.depths[node] = nodes.depths[parent] + 1 if parent >= 0 else 0


@lean
def _move(waiting: Waiting, source: int, target: int) -> None:
    waiting.tokens[target], waiting.parents[target] = waiting.tokens[source], waiting.parents[source]
    waiting.estimates[target], waiting.paths[target] = waiting.estimates[source], waiting.paths[source]
    waiting.described[target] = waiting.described[source]
