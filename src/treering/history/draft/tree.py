"""One row's draft: the tree of continuations of its places that is likeliest to be accepted, grown best first.

Knows candidates and estimates. Knows nothing of how places are found, or of other rows. A index's places are those that
have agreed with its path so far; their next tokens are its candidates.
"""

from typing import Any, NamedTuple

import numpy as np

from treering.arrays import Float32Array, Int16Array
from treering.history.draft.acceptance import estimate
from treering.history.draft.candidates import Facts, Texts, count_votes, describe
from treering.history.draft.prior import NO_TOKEN_VOTES
from treering.history.draft.vote_fractions import sum_up, write_shares
from treering.history.draft.workspace import MAX_CANDIDATES, NO_NODE, NOWHERE, Workspace
from treering.history.features import NUM_SHARES, length_bucket
from treering.history.jit import lean
from treering.history.match.matches import Matches, longest_of

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
    """Whether a index has one child at most."""


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
    """Probability of being reached and accepted that a first index has at least."""
    rise: float
    """How much more the taken behind it have; see `least_behind`."""


class Grown(NamedTuple):
    """What a row's rooms hold so far."""

    num_waiting: int
    num_made: int
    num_members: int


@lean
def grow(texts: Texts, matches: Matches, workspace: Workspace, num_matches: int, model: Model, row: Row) -> int:
    """Fills the room's taken with the draft of a row; returns how many there are. Parents stand before their children.

    Args:
        texts: of the matches.
        matches: of the row.
        workspace: written over.
        num_matches: how many matches.
        model: how candidates are judged.
        row: its state and what it may draft.
    """
    nodes, taken, waiting, paths, members = workspace.nodes, workspace.taken, workspace.waiting, workspace.paths, workspace.members
    for i in range(num_matches):
        members[i] = i
    parent, before = nodes[0], row.before
    parent.token, parent.depth, parent.longest, parent.path = row.token, -1, longest_of(matches, num_matches), 1.0
    parent.begin, parent.end = 0, num_matches
    so_far, num_nodes, least = Grown(0, 1, num_matches), 0, row.least
    while True:
        # What is below the least probability now is so for ever: it rises with the taken.
        if parent.path >= least:
            so_far = _expand(texts, matches, workspace, parent, num_nodes - 1, before, least, model, row.state, so_far)
        if so_far.num_waiting == 0 or num_nodes == row.most:
            return num_nodes
        best, path = 0, paths[0]
        for k in range(1, so_far.num_waiting):
            if paths[k] > path:
                best, path = k, paths[k]
        if path < least:
            return num_nodes
        taken[num_nodes] = waiting[np.uintp(best)]
        parent = nodes[np.uintp(taken[num_nodes])]
        num_nodes += 1
        if num_nodes == row.most:
            return num_nodes
        least = least_behind(row.least, row.rise, num_nodes)
        before = nodes[np.uintp(taken[parent.parent])].token if parent.parent >= 0 else row.token
        last = np.uintp(so_far.num_waiting - 1)
        waiting[np.uintp(best)], paths[np.uintp(best)] = waiting[last], paths[last]
        so_far = Grown(so_far.num_waiting - 1, so_far.num_made, so_far.num_members)


@lean
def least_behind(least: float, rise: float, num_nodes: int) -> float:
    """The least probability that a token is drafted with behind so many others of its row.

    The first tokens of a draft ride along where a pass waits for weights; the more there are, the more each costs.

    Example: with a least probability of 0.02 and a rise of 0.0036 the ninth token has at least 0.056, the 33rd 0.25.
    """
    return least + rise * num_nodes * (1 + num_nodes / _NUM_DOUBLED)


@lean
def _expand(
    texts: Texts, matches: Matches, workspace: Workspace, parent: Any, index: int, before: int, least: float, model: Model,
    state: int, so_far: Grown,
) -> Grown:  # fmt: skip
    """Adds what may come behind a node to those that wait, where it is likely enough.

    The node was taken as index `index`, or is the context with -1; the token before it is `before`.
    """
    num_waiting, num_made, num_members = so_far
    num: int = count_votes(texts, matches, workspace, parent.begin, parent.end, parent.depth + 1, model.is_calibrated, parent.longest)
    num_made = _judge(matches, workspace, parent, index, before, num, model, state, num_made)
    num_waiting = _admit(workspace, num, least, model.is_chain, num_waiting)
    return Grown(num_waiting, num_made, _part(workspace, parent, num, num_members))


@lean
def _judge(
    matches: Matches,
    workspace: Workspace,
    parent: Any,
    index: int,
    before: int,
    num: int,
    model: Model,
    state: int,
    num_made: int,
) -> int:
    """Makes nodes of the candidates that may be followed, with estimates; returns how many nodes there are then."""
    nodes, candidates = workspace.nodes, workspace.candidates
    is_calibrated = model.is_calibrated
    depth = parent.depth + 1
    total, num_longest = sum_up(candidates, num)
    all_votes = total + (NO_TOKEN_VOTES[length_bucket(parent.longest + depth)] if is_calibrated else 0.0)
    for c in range(num):
        candidate = candidates[c]
        candidate.line = NO_NODE
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
        node = nodes[np.uintp(num_made)]
        write_shares(node.shares, candidates, c, num, share, num_longest)
        facts = Facts(
            candidate.best, candidate.length + depth, candidate.count, min(int(share * NUM_SHARES), NUM_SHARES - 1),
            rank,
        )  # fmt: skip
        describe(node.features, matches, facts, depth, candidate.token, state, parent.token, before)
        chance = estimate(model.weights, model.token_weights, node.shares, node.features)
        node.token, node.parent, node.depth, node.longest = candidate.token, index, depth, candidate.length
        node.path, node.estimate = parent.path * chance, chance
        candidate.line = num_made
        num_made += 1
    return num_made


@lean
def _admit(workspace: Workspace, num: int, least: float, is_chain: bool, num_waiting: int) -> int:
    """Lets the candidates' nodes wait that are likely enough, in a chain the likeliest; returns how many wait then.

    By itself, so that one estimate is added up while the next one is: to ask of each at once whether it is enough is to
    wait for each.
    """
    nodes, candidates = workspace.nodes, workspace.candidates
    first, best = num_waiting, 0.0
    for c in range(num):
        line = candidates[c].line
        path = nodes[np.uintp(line)].path
        if line == NO_NODE or path < least or (is_chain and path <= best):
            continue
        k = first if is_chain else num_waiting
        workspace.waiting[np.uintp(k)], workspace.paths[np.uintp(k)] = line, path
        best, num_waiting = path, k + 1
    return num_waiting


@lean
def _part(workspace: Workspace, parent: Any, num: int, num_members: int) -> int:
    """Puts the places of each candidate's node side by side; returns how many members there are then."""
    nodes, candidates, members, which = workspace.nodes, workspace.candidates, workspace.members, workspace.which
    begin, end = parent.begin, parent.end
    if num == 1 and candidates[0].count == end - begin:
        if candidates[0].line != NO_NODE:
            node = nodes[np.uintp(candidates[0].line)]
            node.begin, node.end = begin, end
        return num_members
    # Without branches on what became a node, which would be guessed wrong.
    candidates[MAX_CANDIDATES].line = NO_NODE
    nodes[NO_NODE].end = NOWHERE
    for c in range(num):
        line = candidates[c].line
        node = nodes[np.uintp(line)]
        node.begin = node.end = num_members if line != NO_NODE else NOWHERE
        num_members += candidates[c].count
    for j in range(begin, end):
        node = nodes[np.uintp(candidates[np.uintp(which[np.uintp(j - begin)])].line)]
        members[np.uintp(node.end)] = members[np.uintp(j)]
        node.end += 1
    return num_members
