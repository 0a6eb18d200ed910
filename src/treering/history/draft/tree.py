"""One row's draft: the tree of continuations that is most likely to be accepted, grown best first.

A node's matches are those that agree with its path so far. Their different next tokens are its candidates, with votes,
shares of votes and features. The weight of a match's vote is chosen, not fitted: a fit would be derived from recorded
rollouts, most of whose licences forbid shipping it.

    N tokens of a draft   M matches   C candidates of one node   E nodes ever made
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treering.arrays import Float32Array, Float64Array, Int32Array
from treering.compiling.lean import lean
from treering.history.draft.acceptance import estimate
from treering.history.features import (
    KIND,
    NUM_COUNTS,
    NUM_EDITS,
    NUM_HASHES,
    NUM_KINDS,
    NUM_LENGTH_CLASSES,
    NUM_LENGTHS,
    NUM_NEAR,
    NUM_PAIRS,
    NUM_RANKS,
    NUM_SHARES,
    NUM_SOURCES,
    NUM_STATES,
    NUM_VOTES,
    count_bucket,
    depth_bucket,
    hash_of,
    length_bucket,
    near_bucket,
    put_feature,
    stretch,
)
from treering.history.jit import Memory, pick
from treering.history.match.matches import MAX_MATCHES, Matches, longest_of, vote_bucket

MAX_NODES = 64
MAX_CANDIDATES = 12
NO_NODE = (MAX_NODES + 1) * MAX_CANDIDATES - 1
"""Sentinel row of the nodes, written when a candidate has no node."""
NOWHERE = (MAX_NODES + 1) * MAX_MATCHES
"""Where the sentinel's matches are written among the members: after those of all nodes."""

NODE = np.dtype(
    [
        ("token", np.int32),
        ("parent", np.int32),  # index among the taken nodes, -1 for none
        ("depth", np.int32),  # tokens of the draft before it
        ("longest", np.int32),  # length of its longest match
        ("begin", np.int32),  # where its matches begin among the members
        ("end", np.int32),
        ("path", np.float64),  # probability that it and all tokens before it are accepted
        ("estimate", np.float32),
        ("shares", np.float32, (NUM_VOTES,)),
        ("features", np.int32, (NUM_KINDS,)),
    ],
    align=True,
)
"""A candidate that is likely enough to be drafted. The taken nodes are the draft."""

CANDIDATE = np.dtype(
    [
        ("token", np.int32),
        ("count", np.int32),  # matches that continue with it
        ("best", np.int32),  # the match with the greatest vote
        ("length", np.int32),  # longest match
        ("num_longest", np.int32),  # matches as long as the node's longest
        ("line", np.int32),  # row of its node, NO_NODE for none
        ("votes", np.float64),
        ("best_vote", np.float64),
        ("by_source", np.float64, (NUM_SOURCES,)),
    ],
    align=True,
)
"""One of the different next tokens after a node."""

Nodes = NDArray[Any]
Candidates = NDArray[Any]


class Workspace(NamedTuple):
    """Scratch arrays for the draft of one row."""

    nodes: Nodes  # NODE [E], the context first
    taken: Int32Array  # [N], lines of the nodes in the draft, in the order in which they were taken
    waiting: Int32Array  # [M], lines of the nodes that may be taken next: no two share a match
    paths: Float64Array  # [M], path probabilities of the waiting nodes
    members: Int32Array  # [(N + 2) * M], indices of matches; those of a node are adjacent
    candidates: Candidates  # CANDIDATE [C + 1], the last one for all votes by source, and where rollouts end
    tokens: Int32Array  # [M], next token of each of the node's matches
    votes: Float64Array  # [M], vote of each
    which: Int32Array  # [M], candidate of each, the last one where a rollout ends
    numbers: Int32Array  # [N + 1], where each taken node is written; -1 for the context, which comes first
    sizes: Int32Array  # [N + 1], nodes of each node's subtree
    free: Int32Array  # [N + 1], where the next child of each node is written


WORKSPACE = Memory(
    Workspace,
    nodes=(NODE, (MAX_NODES + 1) * MAX_CANDIDATES),
    taken=(np.int32, MAX_NODES),
    waiting=(np.int32, MAX_MATCHES),
    paths=(np.float64, MAX_MATCHES),
    members=(np.int32, NOWHERE + MAX_MATCHES),
    candidates=(CANDIDATE, MAX_CANDIDATES + 1),
    tokens=(np.int32, MAX_MATCHES),
    votes=(np.float64, MAX_MATCHES),
    which=(np.int32, MAX_MATCHES),
    numbers=(np.int32, MAX_NODES + 1),
    sizes=(np.int32, MAX_NODES + 1),
    free=(np.int32, MAX_NODES + 1),
)
"""Memory of a workspace, for any row."""


_LONG = 4
_BY_LENGTH = -1.0 + 0.6 * np.arange(NUM_LENGTHS)
_BY_SOURCE = np.array([0.0, -0.2, -0.5, -0.5])[:, None]
# After a long match, agreement after an edit counts less.
_PER_EDIT = np.where(np.arange(NUM_LENGTH_CLASSES) < _LONG, 0.5, 0.25)[:, None]

LENGTH_FACTORS = np.exp(_BY_LENGTH + _BY_SOURCE).ravel()
"""Factor of a match's vote, [sources * lengths]. In the prompt's history, each length bucket more multiplies a vote by
exp(0.6) = 1.8; a match in the own context counts exp(-0.5) = 0.6 times as much."""
EDIT_FACTORS = np.exp(_PER_EDIT * np.arange(NUM_EDITS)).ravel()
"""Factor by agreement after an edit, [length classes * edits]."""
SHIFT_FACTORS = np.exp(np.array([-0.3, 0.8, 0.6, 0.2, -0.2, -0.8]))
"""Factor by the distance between a match's position in its rollout and the row's position, [shifts]."""
NO_TOKEN_VOTES = np.exp(0.5 + 0.17 * np.arange(NUM_LENGTHS))
"""Votes against all candidates, [lengths], by the longest match."""


class Texts(NamedTuple):
    """Texts that matches are in; see `matches.IN_HISTORY`."""

    history: Int32Array
    live: Int32Array
    others: Int32Array


class Facts(NamedTuple):
    """Properties of a candidate besides its tokens."""

    match: int
    """Index of the match with the greatest vote."""
    length: int
    """Length of the longest match."""
    own: int
    """Number of matches."""
    share: int
    """Share of the votes, in tenths."""
    rank: int
    """Number of candidates with more votes."""


@lean
def token_at(history: Int32Array, live: Int32Array, others: Int32Array, text: int, at: int) -> np.int32:
    """Return the token at a position of a text, see `matches.IN_HISTORY`; a marker where a rollout ends."""
    found: np.int32 = pick(text, history, live, others, at)
    return found


@lean
def weigh(matches: Matches, num: int) -> None:
    """Write the weight of each match's vote, without its length."""
    for i in range(num):
        match = matches[i]
        edit = np.uintp(vote_bucket(match.length) * NUM_EDITS + match.edit)
        match.weight = EDIT_FACTORS[edit] * SHIFT_FACTORS[np.uintp(match.shift)]


@lean
def count_votes(
    texts: Texts,
    matches: Matches,
    workspace: Workspace,
    begin: int,
    end: int,
    depth: int,
    longest: int,
) -> int:
    """Write the candidates of a node, whose matches are members `begin` to `end`; return the number of candidates.

    If there are several, or a rollout ends, `which` holds the candidate of each match.
    """
    if begin == end:
        return 0
    # Fields are read once, because numba counts references whenever a field of a tuple is read.
    history, live, others = texts.history, texts.live, texts.others
    members, tokens, counted = workspace.members, workspace.tokens, workspace.votes
    match = matches[np.uintp(members[np.uintp(begin)])]
    first, differs = token_at(history, live, others, match.text, match.at + depth), np.int32(0)
    total, most, best, num_longest, sources = 0.0, -1.0, 0, 0, 0
    # Most matches continue with the same token, so that their sums stay in registers.
    for j in range(begin, end):
        number = members[np.uintp(j)]
        match = matches[np.uintp(number)]
        token = token_at(history, live, others, match.text, match.at + depth)
        bucket = length_bucket(match.length + depth)
        vote = match.weight * LENGTH_FACTORS[np.uintp(match.source * NUM_LENGTHS + bucket)]
        tokens[np.uintp(j - begin)], counted[np.uintp(j - begin)] = token, vote
        differs |= token ^ first
        total += vote
        num_longest += match.length == longest
        sources |= 1 << match.source
        if vote > most:
            most, best = vote, number
    if differs != 0 or first < 0:
        num: int = _split_votes(matches, workspace, begin, end, longest)
        return num
    candidate = workspace.candidates[0]
    candidate.token, candidate.votes, candidate.count, candidate.best = first, total, end - begin, best
    candidate.length, candidate.num_longest = longest, num_longest
    for source in range(NUM_SOURCES):
        # The only candidate has all of a source's votes or none.
        candidate.by_source[source] = (sources >> source) & 1
    return 1


@lean
def _split_votes(matches: Matches, workspace: Workspace, begin: int, end: int, longest: int) -> int:
    """Finish `count_votes` where matches continue with different tokens, from the tokens and votes that it wrote."""
    members, tokens, counted, which, candidates = (
        workspace.members,
        workspace.tokens,
        workspace.votes,
        workspace.which,
        workspace.candidates,
    )
    num = 0
    for j in range(end - begin):
        token, vote, number = tokens[np.uintp(j)], counted[np.uintp(j)], members[np.uintp(begin + j)]
        which[np.uintp(j)] = MAX_CANDIDATES
        if token < 0:
            continue
        c = 0
        while c < num and candidates[np.uintp(c)].token != token:
            c += 1
        candidate = candidates[np.uintp(c)]
        if c == num:
            if num == MAX_CANDIDATES:
                continue
            num += 1
            candidate.token, candidate.votes, candidate.count, candidate.best_vote = token, 0.0, 0, -1.0
            candidate.length, candidate.num_longest = 0, 0
            for k in range(NUM_SOURCES):
                candidate.by_source[k] = 0.0
        match = matches[np.uintp(number)]
        length, source = match.length, np.uintp(match.source)
        which[np.uintp(j)] = c
        candidate.votes += vote
        candidate.count += 1
        candidate.by_source[source] += vote
        candidate.length = max(candidate.length, length)
        candidate.num_longest += length == longest
        if vote > candidate.best_vote:
            candidate.best_vote, candidate.best = vote, number
    return num


@lean
def describe(
    out: Int32Array, matches: Matches, facts: Facts, depth: int, token: int, state: int, before: int, earlier: int
) -> None:
    """Write the numbers of a candidate's features.

    Args:
        out: int32 [kinds].
        matches: matches of the row.
        facts: properties of the candidate.
        depth: tokens drafted before it.
        token: token of the candidate.
        state: state of the row.
        before: the previous token.
        earlier: the token before that.
    """
    match = matches[np.uintp(facts.match)]
    source, shift, edit = match.source, match.shift, match.edit
    length, near = length_bucket(facts.length), near_bucket(depth)
    start = state if depth == 0 else NUM_STATES + min(depth - 1, 1)
    put_feature(out, KIND.any, 0)
    put_feature(out, KIND.match, source * NUM_LENGTHS + length)
    put_feature(out, KIND.edit, edit * NUM_LENGTH_CLASSES + min(length, NUM_LENGTH_CLASSES - 1))
    put_feature(out, KIND.shift, shift)
    put_feature(out, KIND.share, facts.share * NUM_NEAR + near)
    put_feature(out, KIND.matches, source * NUM_COUNTS + count_bucket(facts.own))
    put_feature(out, KIND.depth, depth_bucket(depth))
    put_feature(out, KIND.start, start * NUM_LENGTHS + length)
    put_feature(out, KIND.rank, min(facts.rank, NUM_RANKS - 1))
    put_feature(out, KIND.outcome, (state if depth == 0 else NUM_STATES) * NUM_SOURCES + source)
    put_feature(out, KIND.near, near * NUM_LENGTHS + length)
    put_feature(out, KIND.before, before & (NUM_HASHES - 1))
    put_feature(out, KIND.token, token & (NUM_HASHES - 1))
    put_feature(out, KIND.pair, hash_of(token, before, 0, NUM_PAIRS))
    put_feature(out, KIND.triple, hash_of(token, before, earlier + 1, NUM_PAIRS))
    put_feature(out, KIND.token_source, hash_of(token, source, 0, NUM_HASHES))
    put_feature(out, KIND.token_length, hash_of(token, length, 0, NUM_HASHES))


_MEAN_SHARE = 0.02
_SHRINK = 1 / (1 + 3 * _MEAN_SHARE)
_NUM_STRETCHES = 1024
# Computed in advance, because a logarithm per share of each candidate would take longer than everything else.
_STRETCHES = np.array([stretch.py_func((k + 0.5) / _NUM_STRETCHES) for k in range(_NUM_STRETCHES)], np.float32)
_MOST_SHARE = _NUM_STRETCHES - 0.01
_ALL = _STRETCHES[int((1 + _MEAN_SHARE) * _SHRINK * _MOST_SHARE)]
"""Share of the only candidate of a source."""


@lean
def sum_up(candidates: Candidates, num: int) -> tuple[float, int]:
    """Return all votes, and the number of longest matches. With several candidates, also write the votes by source."""
    if num == 1:
        return candidates[0].votes, candidates[0].num_longest
    by_source = candidates[MAX_CANDIDATES].by_source
    total, num_longest = 0.0, 0
    for source in range(NUM_SOURCES):
        by_source[source] = 0.0
    for c in range(num):
        candidate = candidates[c]
        total += candidate.votes
        num_longest += candidate.num_longest
        for source in range(NUM_SOURCES):
            by_source[source] += candidate.by_source[source]
    return total, num_longest


@lean
def write_shares(
    shares: Float32Array, candidates: Candidates, c: int, num: int, share: float, num_longest: int
) -> None:
    """Write the stretched vote shares of candidate `c` of `num`; see `features.NUM_VOTES`."""
    own, whole = candidates[np.uintp(c)].by_source, candidates[MAX_CANDIDATES].by_source
    shares[0] = _STRETCHES[np.uintp(int(share * _MOST_SHARE))]
    for source in range(NUM_SOURCES):
        shares[1 + source] = 0.0
        if num == 1:
            shares[1 + source] = _ALL if own[source] > 0 else 0.0
        elif whole[source] > 0:
            part = (own[source] / whole[source] + _MEAN_SHARE) * _SHRINK
            shares[1 + source] = _STRETCHES[np.uintp(int(part * _MOST_SHARE))]
    part = (candidates[np.uintp(c)].num_longest + 0.1) / (num_longest + 0.4)
    shares[1 + NUM_SOURCES] = _STRETCHES[np.uintp(int(part * _MOST_SHARE))]


_LEAST_SHARE = 0.01
_NUM_DOUBLED = 32
"""Tokens after which the least probability has risen twice as far as along a straight line."""


class Model(NamedTuple):
    """Weights and shape by which candidates are judged."""

    weights: Float32Array
    is_chain: bool
    """Whether each node has at most one child."""


class Row(NamedTuple):
    """What a draft is grown for: the state of the row, its last tokens and its limits."""

    state: int
    """State of the row, see `features.NUM_STATES`."""
    token: int
    """Last token of the context."""
    before: int
    """The token before it, -1 for none."""
    most: int
    """Most nodes."""
    least: float
    """Least probability of being reached and accepted for the first node."""
    rise: float
    """Increase of that probability for later nodes; see `least_after`."""


class Grown(NamedTuple):
    """Numbers of entries that are filled in the workspace."""

    num_waiting: int
    num_made: int
    num_members: int


@lean
def grow(
    texts: Texts, matches: Matches, workspace: Workspace, num_matches: int, model: Model, row: Row
) -> tuple[int, int]:
    """Take the nodes of a row's draft into the workspace. Parents come before their children.

    Args:
        texts: texts that the matches are in.
        matches: matches of the row.
        workspace: overwritten.
        num_matches: number of matches.
        model: judges candidates.
        row: the row and its limits.

    Returns:
        The number of nodes taken, and the number of lines of the workspace that are nodes, the first one the context.
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
        # The least probability only rises, so a node that is below it now stays below.
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
    """Return the least probability at which a token is drafted after `num_nodes` others of its row.

    The first tokens of a draft are nearly free while a pass waits for weights; each later token costs more.

    Example: with a least probability of 0.02 and a rise of 0.0036 the ninth token has at least 0.056, the 33rd 0.25.
    """
    return least + rise * num_nodes * (1 + num_nodes / _NUM_DOUBLED)


@lean
def _expand(
    texts: Texts, matches: Matches, workspace: Workspace, parent: Any, index: int, before: int, least: float,
    model: Model, state: int, so_far: Grown,
) -> Grown:  # fmt: skip
    """Add the likely enough continuations of a node to the waiting ones.

    The node is the taken node `index`, or the context for -1; the token before it is `before`.
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
    """Make nodes with estimates of the candidates that may be followed; return the new number of nodes."""
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
    """Add the likely enough nodes to the waiting ones, in a chain only the likeliest; return how many nodes wait.

    This is not done in `_judge`, because testing each estimate as it is computed would serialise the additions.
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
    """Group the matches by the nodes of their candidates; return the new number of members."""
    nodes, candidates, members, which = workspace.nodes, workspace.candidates, workspace.members, workspace.which
    begin, end = parent.begin, parent.end
    if num == 1 and candidates[0].count == end - begin:
        if candidates[0].line != NO_NODE:
            node = nodes[np.uintp(candidates[0].line)]
            node.begin, node.end = begin, end
        return num_members
    # There is no branch on whether a candidate became a node, because it would be mispredicted.
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
