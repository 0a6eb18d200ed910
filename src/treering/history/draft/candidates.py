"""The different tokens that may come next at a index: the votes of its matches, and what is known of each token.

Knows places and votes. Knows nothing of trees and of what votes are worth.

    M places   C candidates of one index
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import Int32Array
from treering.history.draft.prior import EDIT_FACTORS, LENGTH_FACTORS, SHIFT_FACTORS
from treering.history.draft.workspace import MAX_CANDIDATES, Workspace
from treering.history.features import (
    FIRST,
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
)
from treering.history.jit import lean, pick
from treering.history.match.matches import Matches, vote_bucket


class Texts(NamedTuple):
    """Where the tokens behind places stand; see `matches.IN_HISTORY`."""

    history: Int32Array
    live: Int32Array
    others: Int32Array


class Facts(NamedTuple):
    """What is known of a candidate beside its tokens."""

    place: int
    """With the greatest vote."""
    length: int
    """The longest match."""
    own: int
    """Matches that it has."""
    share: int
    """Of the votes, in tenths."""
    rank: int
    """Candidates with more votes."""


@lean
def token_at(history: Int32Array, live: Int32Array, others: Int32Array, text: int, at: int) -> np.int32:
    """The token at a place of a text, see `matches.IN_HISTORY`; a marker where a rollout ends."""
    found: np.int32 = pick(text, history, live, others, at)
    return found


@lean
def weigh(matches: Matches, num: int, is_calibrated: bool, longest: int) -> None:
    """Writes what each match's vote counts apart from its length."""
    for i in range(num):
        place = matches[i]
        if is_calibrated:
            edit = np.uintp(vote_bucket(place.length) * NUM_EDITS + place.edit)
            place.weight = EDIT_FACTORS[edit] * SHIFT_FACTORS[np.uintp(place.shift)]
        else:
            place.weight = 0.0 if place.length < longest else 1.0


@lean
def count_votes(
    texts: Texts,
    matches: Matches,
    workspace: Workspace,
    begin: int,
    end: int,
    depth: int,
    is_calibrated: bool,
    longest: int,
) -> int:
    """Fills the candidates from a index's matches, the members from `begin` to `end`; returns how many there are.

    Where they are several, or a rollout ends, `which` says the candidate of each place.
    """
    if begin == end:
        return 0
    # Taken apart once: numba counts references whenever a field of a tuple is read.
    history, live, others = texts.history, texts.live, texts.others
    members, tokens, counted = workspace.members, workspace.tokens, workspace.votes
    place = matches[np.uintp(members[np.uintp(begin)])]
    first, differs = token_at(history, live, others, place.text, place.at + depth), np.int32(0)
    total, most, best, num_longest, sources = 0.0, -1.0, 0, 0, 0
    # Most go on with the same token: sums of all stay in registers.
    for j in range(begin, end):
        number = members[np.uintp(j)]
        place = matches[np.uintp(number)]
        token = token_at(history, live, others, place.text, place.at + depth)
        vote = place.weight
        if is_calibrated:
            vote *= LENGTH_FACTORS[np.uintp(place.source * NUM_LENGTHS + length_bucket(place.length + depth))]
        tokens[np.uintp(j - begin)], counted[np.uintp(j - begin)] = token, vote
        differs |= token ^ first
        total += vote
        num_longest += place.length == longest
        sources |= (vote > 0) << place.source
        if vote > most:
            most, best = vote, number
    if differs != 0 or first < 0:
        num: int = _tell_apart(matches, workspace, begin, end, longest)
        return num
    candidate = workspace.candidates[0]
    candidate.token, candidate.votes, candidate.count, candidate.best = first, total, end - begin, best
    candidate.length, candidate.num_longest = longest, num_longest
    for source in range(NUM_SOURCES):
        # Of what a source says it has all or nothing, however much that is.
        candidate.by_source[source] = (sources >> source) & 1
    return 1


@lean
def _tell_apart(matches: Matches, workspace: Workspace, begin: int, end: int, longest: int) -> int:
    """`count_votes` where places go on with different tokens, from the tokens and votes that it wrote."""
    members, tokens, counted, which, candidates = workspace.members, workspace.tokens, workspace.votes, workspace.which, workspace.candidates
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
        place = matches[np.uintp(number)]
        length, source = place.length, np.uintp(place.source)
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
    place = matches[np.uintp(facts.place)]
    source, shift, edit = place.source, place.shift, place.edit
    length, near = length_bucket(facts.length), near_bucket(depth)
    start = state if depth == 0 else NUM_STATES + min(depth - 1, 1)
    out[0] = FIRST[0]
    out[1] = FIRST[1] + source * NUM_LENGTHS + length
    out[2] = FIRST[2] + edit * NUM_LENGTH_CLASSES + min(length, NUM_LENGTH_CLASSES - 1)
    out[3] = FIRST[3] + shift
    out[4] = FIRST[4] + facts.share * NUM_NEAR + near
    out[5] = FIRST[5] + source * NUM_COUNTS + count_bucket(facts.own)
    out[6] = FIRST[6] + depth_bucket(depth)
    out[7] = FIRST[7] + start * NUM_LENGTHS + length
    out[8] = FIRST[8] + min(facts.rank, NUM_RANKS - 1)
    out[9] = FIRST[9] + (state if depth == 0 else NUM_STATES) * NUM_SOURCES + source
    out[10] = FIRST[10] + near * NUM_LENGTHS + length
    out[11] = FIRST[11] + (before & (NUM_HASHES - 1))
    out[12] = FIRST[12] + (token & (NUM_HASHES - 1))
    out[13] = FIRST[13] + hash_of(token, before, 0, NUM_PAIRS)
    out[14] = FIRST[14] + hash_of(token, before, earlier + 1, NUM_PAIRS)
    out[15] = FIRST[15] + hash_of(token, source, 0, NUM_HASHES)
    out[16] = FIRST[16] + hash_of(token, length, 0, NUM_HASHES)
