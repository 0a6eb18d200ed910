"""One row's draft: the tree of continuations of its places that is likeliest to be accepted, grown best first.

Knows candidates and estimates. Knows nothing of how places are found, or of other rows. A node's places are those that
have agreed with its path so far; their next tokens are its candidates.
"""

from typing import Any, NamedTuple

import numpy as np

from treering.arrays import Float32Array, Int16Array
from treering.history.draft.acceptance import estimate
from treering.history.draft.candidates import Facts, Texts, count_votes, describe
from treering.history.draft.prior import NO_TOKEN_VOTES
from treering.history.draft.vote_fractions import sum_up, write_shares
from treering.history.draft.workspace import MAX_CANDIDATES, NO_BUD, NOWHERE, Workspace
from treering.history.features import NUM_SHARES, length_bucket
from treering.history.jit import lean
from treering.history.match.matches import Places, longest_of

_LEAST_SHARE = 0.01
_NUM_DOUBLED = 32
"""Tokens behind which the least probability has risen twice as far as in a straight line."""


class Model(NamedTuple):
    """How candidates are judged."""

    weights: Float32Array
    token_weights: Int16Array
    is_calibrated: bool
    """Whether all matches vote; else the longest ones do, each alike."""
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
    num_buds: int
    num_members: int


@lean
def grow(texts: Texts, places: Places, room: Workspace, num_places: int, model: Model, row: Row) -> int:
    """Fills the room's nodes with the draft of a row; returns how many there are. Parents stand before their children.

    Args:
        texts: of the places.
        places: of the row.
        room: written over.
        num_places: how many places.
        model: how candidates are judged.
        row: its state and what it may draft.
    """
    buds, nodes, waiting, paths, members = room.buds, room.nodes, room.waiting, room.paths, room.members
    for i in range(num_places):
        members[i] = i
    stem, before = buds[0], row.before
    stem.token, stem.depth, stem.longest, stem.path = row.token, -1, longest_of(places, num_places), 1.0
    stem.begin, stem.end = 0, num_places
    so_far, num_nodes, least = Grown(0, 1, num_places), 0, row.least
    while True:
        # What is below the least probability now is so for ever: it rises with the nodes.
        if stem.path >= least:
            so_far = _expand(texts, places, room, stem, num_nodes - 1, before, least, model, row.state, so_far)
        if so_far.num_waiting == 0 or num_nodes == row.most:
            return num_nodes
        best, path = 0, paths[0]
        for k in range(1, so_far.num_waiting):
            if paths[k] > path:
                best, path = k, paths[k]
        if path < least:
            return num_nodes
        nodes[num_nodes] = waiting[np.uintp(best)]
        stem = buds[np.uintp(nodes[num_nodes])]
        num_nodes += 1
        if num_nodes == row.most:
            return num_nodes
        least = least_behind(row.least, row.rise, num_nodes)
        before = buds[np.uintp(nodes[stem.parent])].token if stem.parent >= 0 else row.token
        last = np.uintp(so_far.num_waiting - 1)
        waiting[np.uintp(best)], paths[np.uintp(best)] = waiting[last], paths[last]
        so_far = Grown(so_far.num_waiting - 1, so_far.num_buds, so_far.num_members)


@lean
def least_behind(least: float, rise: float, num_nodes: int) -> float:
    """The least probability that a token is drafted with behind so many others of its row.

    The first tokens of a draft ride along where a pass waits for weights; the more there are, the more each costs.

    Example: with a least probability of 0.02 and a rise of 0.0036 the ninth token has at least 0.056, the 33rd 0.25.
    """
    return least + rise * num_nodes * (1 + num_nodes / _NUM_DOUBLED)


@lean
def _expand(
    texts: Texts, places: Places, room: Workspace, stem: Any, node: int, before: int, least: float, model: Model,
    state: int, so_far: Grown,
) -> Grown:  # fmt: skip
    """Adds what may come behind a bud to those that wait, where it is likely enough.

    The bud was taken as node `node`, or is the context with -1; the token before it is `before`.
    """
    num_waiting, num_buds, num_members = so_far
    num: int = count_votes(texts, places, room, stem.begin, stem.end, stem.depth + 1, model.is_calibrated, stem.longest)
    num_buds = _judge(places, room, stem, node, before, num, model, state, num_buds)
    num_waiting = _admit(room, num, least, model.is_chain, num_waiting)
    return Grown(num_waiting, num_buds, _part(room, stem, num, num_members))


@lean
def _judge(
    places: Places,
    room: Workspace,
    stem: Any,
    node: int,
    before: int,
    num: int,
    model: Model,
    state: int,
    num_buds: int,
) -> int:
    """Makes buds of the candidates that may be followed, with estimates; returns how many buds there are then."""
    buds, candidates = room.buds, room.candidates
    is_calibrated = model.is_calibrated
    depth = stem.depth + 1
    total, num_longest = sum_up(candidates, num)
    all_votes = total + (NO_TOKEN_VOTES[length_bucket(stem.longest + depth)] if is_calibrated else 0.0)
    for c in range(num):
        candidate = candidates[c]
        candidate.line = NO_BUD
        share = candidate.votes / all_votes if all_votes > 0 else 0.0
        if share < _LEAST_SHARE:
            continue
        rank = 0
        if num > 1:
            for other in range(num):
                rank += candidates[other].votes > candidate.votes
        if not is_calibrated and rank > 0:
            # The policy chooses; estimates only say how far it is followed.
            continue
        bud = buds[np.uintp(num_buds)]
        write_shares(bud.shares, candidates, c, num, share, num_longest)
        facts = Facts(
            candidate.best, candidate.length + depth, candidate.count, min(int(share * NUM_SHARES), NUM_SHARES - 1),
            rank,
        )  # fmt: skip
        describe(bud.features, places, facts, depth, candidate.token, state, stem.token, before)
        chance = estimate(model.weights, model.token_weights, bud.shares, bud.features)
        bud.token, bud.parent, bud.depth, bud.longest = candidate.token, node, depth, candidate.length
        bud.path, bud.estimate = stem.path * chance, chance
        candidate.line = num_buds
        num_buds += 1
    return num_buds


@lean
def _admit(room: Workspace, num: int, least: float, is_chain: bool, num_waiting: int) -> int:
    """Lets the candidates' buds wait that are likely enough, in a chain the likeliest; returns how many wait then.

    By itself, so that one estimate is added up while the next one is: to ask of each at once whether it is enough is to
    wait for each.
    """
    buds, candidates = room.buds, room.candidates
    first, best = num_waiting, 0.0
    for c in range(num):
        line = candidates[c].line
        path = buds[np.uintp(line)].path
        if line == NO_BUD or path < least or (is_chain and path <= best):
            continue
        k = first if is_chain else num_waiting
        room.waiting[np.uintp(k)], room.paths[np.uintp(k)] = line, path
        best, num_waiting = path, k + 1
    return num_waiting


@lean
def _part(room: Workspace, stem: Any, num: int, num_members: int) -> int:
    """Puts the places of each candidate's bud side by side; returns how many members there are then."""
    buds, candidates, members, which = room.buds, room.candidates, room.members, room.which
    begin, end = stem.begin, stem.end
    if num == 1 and candidates[0].count == end - begin:
        if candidates[0].line != NO_BUD:
            bud = buds[np.uintp(candidates[0].line)]
            bud.begin, bud.end = begin, end
        return num_members
    # Without branches on what became a bud, which would be guessed wrong.
    candidates[MAX_CANDIDATES].line = NO_BUD
    buds[NO_BUD].end = NOWHERE
    for c in range(num):
        line = candidates[c].line
        bud = buds[np.uintp(line)]
        bud.begin = bud.end = num_members if line != NO_BUD else NOWHERE
        num_members += candidates[c].count
    for j in range(begin, end):
        bud = buds[np.uintp(candidates[np.uintp(which[np.uintp(j - begin)])].line)]
        members[np.uintp(bud.end)] = members[np.uintp(j)]
        bud.end += 1
    return num_members
