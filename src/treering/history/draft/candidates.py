"""Candidates after a node: the different next tokens of its matches, with their votes, shares of votes and features.

How much a match's vote counts is chosen, not fitted: a fit to recorded rollouts would be derived from them, and most of
their licences forbid shipping that.

    M matches   C candidates of one node
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import Float32Array, Int32Array
from treering.compiling.lean import lean
from treering.history.draft.workspace import MAX_CANDIDATES, Candidates, Workspace
from treering.history.features import (
    KIND,
    NUM_COUNTS,
    NUM_EDITS,
    NUM_HASHES,
    NUM_LENGTH_CLASSES,
    NUM_LENGTHS,
    NUM_NEAR,
    NUM_PAIRS,
    NUM_RANKS,
    NUM_SOURCES,
    NUM_STATES,
    count_bucket,
    depth_bucket,
    hash_of,
    length_bucket,
    near_bucket,
    put_feature,
    stretch,
)
from treering.history.jit import pick
from treering.history.match.matches import Matches, vote_bucket

SHARES = (0.7, 0.1, 0.1, 0.1, 0.1, 0.2)
"""Weights of a candidate's vote shares: among all matches, in each of four sources, among the longest matches."""

_LONG = 4
_BY_LENGTH = -1.0 + 0.6 * np.arange(NUM_LENGTHS)
_BY_SOURCE = np.array([0.0, -0.2, -0.5, -0.5])[:, None]
# After a long match, agreement after an edit says less.
_PER_EDIT = np.where(np.arange(NUM_LENGTH_CLASSES) < _LONG, 0.5, 0.25)[:, None]

LENGTH_FACTORS = np.exp(_BY_LENGTH + _BY_SOURCE).ravel()
"""Factor of a match's vote, [sources * lengths]. Of two matches in the prompt's history, the one that is a length
bucket longer counts exp(0.6) = 1.8 times as much; one in own context counts exp(-0.5) = 0.6 times as much."""
EDIT_FACTORS = np.exp(_PER_EDIT * np.arange(NUM_EDITS)).ravel()
"""Factor by agreement after an edit, [length classes * edits]."""
SHIFT_FACTORS = np.exp(np.array([-0.3, 0.8, 0.6, 0.2, -0.2, -0.8]))
"""Factor by how far a match's position in its rollout is from the row's in its own, [shifts]."""
NO_TOKEN_VOTES = np.exp(0.5 + 0.17 * np.arange(NUM_LENGTHS))
"""Votes for none of the candidates, [lengths], by the longest match."""


class Texts(NamedTuple):
    """The texts that matches are in; see `matches.IN_HISTORY`."""

    history: Int32Array
    live: Int32Array
    others: Int32Array


class Facts(NamedTuple):
    """What is known of a candidate besides its tokens."""

    match: int
    """Number of the match with the greatest vote."""
    length: int
    """Longest match."""
    own: int
    """Number of its matches."""
    share: int
    """Of the votes, in tenths."""
    rank: int
    """Candidates with more votes."""


@lean
def token_at(history: Int32Array, live: Int32Array, others: Int32Array, text: int, at: int) -> np.int32:
    """The token at a position of a text, see `matches.IN_HISTORY`; a marker where a rollout ends."""
    found: np.int32 = pick(text, history, live, others, at)
    return found


@lean
def weigh(matches: Matches, num: int) -> None:
    """Writes what each match's vote counts apart from its length."""
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
    """Writes the candidates of a node, whose matches are the members from `begin` to `end`; returns how many.

    If there are several, or a rollout ends, `which` holds the candidate of each match.
    """
    if begin == end:
        return 0
    # Read once: numba counts references whenever a field of a tuple is read.
    history, live, others = texts.history, texts.live, texts.others
    members, tokens, counted = workspace.members, workspace.tokens, workspace.votes
    match = matches[np.uintp(members[np.uintp(begin)])]
    first, differs = token_at(history, live, others, match.text, match.at + depth), np.int32(0)
    total, most, best, num_longest, sources = 0.0, -1.0, 0, 0, 0
    # Most matches continue with the same token: their sums stay in registers.
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
        num: int = _tell_apart(matches, workspace, begin, end, longest)
        return num
    candidate = workspace.candidates[0]
    candidate.token, candidate.votes, candidate.count, candidate.best = first, total, end - begin, best
    candidate.length, candidate.num_longest = longest, num_longest
    for source in range(NUM_SOURCES):
        # The only candidate has all or nothing of a source's votes.
        candidate.by_source[source] = (sources >> source) & 1
    return 1


@lean
def _tell_apart(matches: Matches, workspace: Workspace, begin: int, end: int, longest: int) -> int:
    """`count_votes` where matches continue with different tokens, from the tokens and votes that it wrote."""
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
    """Writes the numbers of a candidate's features.

    Args:
        out: int32 [kinds].
        matches: of the row.
        facts: of the candidate.
        depth: tokens drafted before it.
        token: its own.
        state: of the row.
        before: the token before it.
        earlier: the one before that.
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
# Made once: a logarithm for each share of each candidate would take longer than all the rest of it.
_STRETCHES = np.array([stretch.py_func((k + 0.5) / _NUM_STRETCHES) for k in range(_NUM_STRETCHES)], np.float32)
_MOST_SHARE = _NUM_STRETCHES - 0.01
_ALL = _STRETCHES[int((1 + _MEAN_SHARE) * _SHRINK * _MOST_SHARE)]
"""The share of the only candidate of a source."""


@lean
def sum_up(candidates: Candidates, num: int) -> tuple[float, int]:
    """All votes, and how many matches are the longest. With several candidates, also writes the votes by source."""
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
    """The shares of the votes of one of so many candidates, stretched; see `features.NUM_VOTES`."""
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
