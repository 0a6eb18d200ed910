"""Room for one row's draft while it grows: made once per call, written over by every row.

Knows sizes. Knows nothing of what is written.

    N tokens of a draft   M places   F candidates that wait   C candidates of one node   E candidates that ever waited
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from treering.history.features import NUM_KINDS, NUM_SOURCES, NUM_VOTES
from treering.history.places import MAX_PLACES

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]

MAX_NODES = 64
MAX_WAITING = 256
MAX_CANDIDATES = 12


class Nodes(NamedTuple):
    """Room for the draft of one row; the fields of a token."""

    tokens: Int32Array  # [N]
    parents: Int32Array  # [N]
    estimates: Float32Array  # [N]
    paths: Float64Array  # [N], probability that it and all before it are accepted
    described: Int32Array  # [N], line of `Described`
    depths: Int32Array  # [N]
    members: Int32Array  # [(N + 1) * M], numbers of places; a node's stand together, and `Described` says where


class Waiting(NamedTuple):
    """Room for candidates that are no node yet."""

    tokens: Int32Array  # [F]
    parents: Int32Array  # [F]
    estimates: Float32Array  # [F]
    paths: Float64Array  # [F]
    described: Int32Array  # [F], line of `Described`


class Described(NamedTuple):
    """Room for what is known of every candidate that ever waited; E is large enough for all."""

    shares: Float32Array  # [E, votes]
    features: Int32Array  # [E, kinds]
    begins: Int32Array  # [E], where its places stand among the members
    ends: Int32Array  # [E]


class Candidates(NamedTuple):
    """Room for the different next tokens of one node."""

    tokens: Int32Array  # [C]
    votes: Float64Array  # [C]
    counts: Int32Array  # [C]
    best: Int32Array  # [C], place with the greatest vote
    best_vote: Float64Array  # [C]
    length: Int32Array  # [C], longest match
    num_longest: Int32Array  # [C], places with the longest match of all
    lines: Int32Array  # [C], line of `Described`, -1 where it does not wait
    which: Int32Array  # [M], candidate of each of the node's places, -1 where a rollout ends
    by_source: Float64Array  # [C + 1, sources], the last line for their sum


class Room(NamedTuple):
    """All of it."""

    nodes: Nodes
    waiting: Waiting
    candidates: Candidates
    described: Described
    order: Int32Array  # [N], nodes in the order in which they are written
    number: Int32Array  # [N], of each node in that order
    first_child: Int32Array  # [N + 1], the last one of those without a parent
    next_child: Int32Array  # [N], of the same parent


@njit
def make_room() -> Room:
    """Room for any row."""
    orders = np.empty((4, MAX_NODES + 1), np.int32)
    nodes, waiting, candidates, described = _make_nodes(), _make_waiting(), _make_candidates(), _make_described()
    return Room(nodes, waiting, candidates, described, orders[0], orders[1], orders[2], orders[3])


@njit
def _make_nodes() -> Nodes:
    """Room for the draft of any row."""
    return Nodes(
        np.empty(MAX_NODES, np.int32),
        np.empty(MAX_NODES, np.int32),
        np.empty(MAX_NODES, np.float32),
        np.empty(MAX_NODES, np.float64),
        np.empty(MAX_NODES, np.int32),
        np.empty(MAX_NODES, np.int32),
        np.empty((MAX_NODES + 1) * MAX_PLACES, np.int32),
    )


@njit
def _make_waiting() -> Waiting:
    """Room for candidates."""
    return Waiting(
        np.empty(MAX_WAITING, np.int32),
        np.empty(MAX_WAITING, np.int32),
        np.empty(MAX_WAITING, np.float32),
        np.empty(MAX_WAITING, np.float64),
        np.empty(MAX_WAITING, np.int32),
    )


@njit
def _make_described() -> Described:
    """Room for the candidates of all nodes of one row."""
    size = (MAX_NODES + 1) * MAX_CANDIDATES
    shares, features = np.empty((size, NUM_VOTES), np.float32), np.empty((size, NUM_KINDS), np.int32)
    bounds = np.empty((2, size), np.int32)
    return Described(shares, features, bounds[0], bounds[1])


@njit
def _make_candidates() -> Candidates:
    """Room for the candidates of one node."""
    ints = np.empty((6, MAX_CANDIDATES), np.int32)
    which = np.empty(MAX_PLACES, np.int32)
    floats = np.empty((2, MAX_CANDIDATES))
    by_source = np.empty((MAX_CANDIDATES + 1, NUM_SOURCES))
    return Candidates(ints[0], floats[0], ints[1], ints[2], floats[1], ints[3], ints[4], ints[5], which, by_source)
