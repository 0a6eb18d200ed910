"""One row's draft: the tree of continuations that is most likely to be accepted, grown best first.

A node's matches are those that agree with its path so far; their next tokens are its candidates.
"""

from typing import Any, NamedTuple

import numpy as np

from treering.arrays import Float32Array
from treering.compiling.lean import lean
from treering.history.draft.acceptance import estimate
from treering.history.draft.candidates import NO_TOKEN_VOTES, Facts, Texts, count_votes, describe, sum_up, write_shares
from treering.history.draft.workspace import MAX_CANDIDATES, NO_NODE, NOWHERE, Workspace
from treering.history.features import NUM_SHARES, length_bucket
from treering.history.match.matches import Matches, longest_of

_LEAST_SHARE = 0.01
_NUM_DOUBLED = 32
"""Tokens after which the least probability has risen twice as far as along a straight line."""


class Model(NamedTuple):
    """How candidates are judged."""

    weights: Float32Array
    is_chain: bool
    """Whether each node has at most one child."""


class Row(NamedTuple):
    """What a draft is grown for: the state of the row, its last tokens and its limits."""

    state: int
    """See `features.NUM_STATES`."""
    token: int
    """Last one of the context."""
    before: int
    """The one before it, -1 for none."""
    most: int
    """Nodes at most."""
    least: float
    """Least probability of being reached and accepted that a first node may have."""
    rise: float
    """How much more later nodes need; see `least_after`."""


class Grown(NamedTuple):
    """How far the workspace is filled."""

    num_waiting: int
    num_made: int
    num_members: int


@lean
def grow(
    texts: Texts, matches: Matches, workspace: Workspace, num_matches: int, model: Model, row: Row
) -> tuple[int, int]:
    """Takes the nodes of a row's draft into the workspace. Parents come before their children.

    Returns:
        How many nodes it has taken, and how many lines of the workspace are nodes, the first one of the context.

    Args:
        texts: those that the matches are in.
        matches: of the row.
        workspace: overwritten.
        num_matches: how many matches there are.
        model: how candidates are judged.
        row: the row and its limits.
    """
    nodes, taken, waiting, paths, members = (
        workspace.nodes,
        workspace.taken,
        workspace.waiting,
        workspace.paths,
        workspace.members,
    )
    for i in range(num_matches):
        members[i] = i
    parent, before = nodes[0], row.before
    parent.token, parent.depth, parent.longest, parent.path = row.token, -1, longest_of(matches, num_matches), 1.0
    parent.begin, parent.end = 0, num_matches
    so_far, num_nodes, least = Grown(0, 1, num_matches), 0, row.least
    while True:
        # The least probability only rises, so what is below it now stays below.
        if parent.path >= least:
            so_far = _expand(texts, matches, workspace, parent, num_nodes - 1, before, least, model, row.state, so_far)
        if so_far.num_waiting == 0 or num_nodes == row.most:
            return num_nodes, so_far.num_made
        best, path = 0, paths[0]
        for k in range(1, so_far.num_waiting):
            if paths[k] > path:
                best, path = k, paths[k]
        if path < least:
            return num_nodes, so_far.num_made
        taken[num_nodes] = waiting[np.uintp(best)]
        parent = nodes[np.uintp(taken[num_nodes])]
        num_nodes += 1
        if num_nodes == row.most:
            return num_nodes, so_far.num_made
        least = least_after(row.least, row.rise, num_nodes)
        before = nodes[np.uintp(taken[parent.parent])].token if parent.parent >= 0 else row.token
        last = np.uintp(so_far.num_waiting - 1)
        waiting[np.uintp(best)], paths[np.uintp(best)] = waiting[last], paths[last]
        so_far = Grown(so_far.num_waiting - 1, so_far.num_made, so_far.num_members)


@lean
def least_after(least: float, rise: float, num_nodes: int) -> float:
    """The least probability at which a token is drafted after `num_nodes` others of its row.

    The first tokens of a draft are nearly free while a pass waits for weights; the more there are, the more each costs.

    Example: with a least probability of 0.02 and a rise of 0.0036 the ninth token has at least 0.056, the 33rd 0.25.
    """
    return least + rise * num_nodes * (1 + num_nodes / _NUM_DOUBLED)


@lean
def _expand(
    texts: Texts, matches: Matches, workspace: Workspace, parent: Any, index: int, before: int, least: float,
    model: Model, state: int, so_far: Grown,
) -> Grown:  # fmt: skip
    """Adds the likely enough continuations of a node to the waiting ones.

    The node is number `index` of the taken ones, or the context for -1; the token before it is `before`.
    """
    num_waiting, num_made, num_members = so_far
    num: int = count_votes(texts, matches, workspace, parent.begin, parent.end, parent.depth + 1, parent.longest)
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
    """Makes nodes with estimates of the candidates that may be followed; returns how many nodes there are then."""
    nodes, candidates = workspace.nodes, workspace.candidates
    depth = parent.depth + 1
    total, num_longest = sum_up(candidates, num)
    all_votes = total + NO_TOKEN_VOTES[length_bucket(parent.longest + depth)]
    for c in range(num):
        candidate = candidates[c]
        candidate.line = NO_NODE
        share = candidate.votes / all_votes
        if share < _LEAST_SHARE:
            continue
        rank = 0
        if num > 1:
            for other in range(num):
                rank += candidates[other].votes > candidate.votes
        node = nodes[np.uintp(num_made)]
        write_shares(node.shares, candidates, c, num, share, num_longest)
        facts = Facts(
            candidate.best, candidate.length + depth, candidate.count, min(int(share * NUM_SHARES), NUM_SHARES - 1),
            rank,
        )  # fmt: skip
        describe(node.features, matches, facts, depth, candidate.token, state, parent.token, before)
        chance = estimate(model.weights, node.shares, node.features)
        node.token, node.parent, node.depth, node.longest = candidate.token, index, depth, candidate.length
        node.path, node.estimate = parent.path * chance, chance
        candidate.line = num_made
        num_made += 1
    return num_made


@lean
def _admit(workspace: Workspace, num: int, least: float, is_chain: bool, num_waiting: int) -> int:
    """Adds the likely enough nodes to the waiting ones, in a chain only the likeliest; returns how many wait then.

    Kept separate from `_judge`: testing each estimate as it is computed would serialise the additions.
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
    """Puts the matches of each candidate's node side by side; returns how many members there are then."""
    nodes, candidates, members, which = workspace.nodes, workspace.candidates, workspace.members, workspace.which
    begin, end = parent.begin, parent.end
    if num == 1 and candidates[0].count == end - begin:
        if candidates[0].line != NO_NODE:
            node = nodes[np.uintp(candidates[0].line)]
            node.begin, node.end = begin, end
        return num_members
    # No branch on whether a candidate became a node: it would be mispredicted.
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
