"""Room for one row's draft while it grows: made once per call, written over by every row.

Knows sizes. Knows nothing of what is written. What is known of one thing lies side by side, so that one address leads
to all of it: with an array for each of its fields there are more addresses than registers.

    N tokens of a draft   M places   C candidates of one index   E nodes that there ever were
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from treering.arrays import Float64Array, Int32Array
from treering.history.features import NUM_KINDS, NUM_SOURCES, NUM_VOTES
from treering.history.match.matches import MAX_MATCHES

MAX_NODES = 64
MAX_CANDIDATES = 12
NO_NODE = (MAX_NODES + 1) * MAX_CANDIDATES - 1
"""The last line of the nodes, which no node gets: of what is no node."""
NOWHERE = (MAX_NODES + 1) * MAX_MATCHES
"""Where its places are written among the members: behind those of all nodes."""

NODE = np.dtype(
    [
        ("token", np.int32),
        ("parent", np.int32),  # index, -1 for none
        ("depth", np.int32),  # tokens of the draft before it
        ("longest", np.int32),  # match of its places
        ("begin", np.int32),  # where its places stand among the members
        ("end", np.int32),
        ("path", np.float64),  # probability that it and all before it are accepted
        ("estimate", np.float32),
        ("shares", np.float32, (NUM_VOTES,)),
        ("features", np.int32, (NUM_KINDS,)),
    ],
    align=True,
)
"""A token that the draft may go on with: a candidate that is likely enough. Those that are taken are its taken."""

CANDIDATE = np.dtype(
    [
        ("token", np.int32),
        ("count", np.int32),  # places that go on with it
        ("best", np.int32),  # the one with the greatest vote
        ("length", np.int32),  # longest match
        ("num_longest", np.int32),  # places with the longest match of all
        ("line", np.int32),  # its node, NO_NODE where it is none
        ("votes", np.float64),
        ("best_vote", np.float64),
        ("by_source", np.float64, (NUM_SOURCES,)),
    ],
    align=True,
)
"""One of the different next tokens of a index."""

Nodes = NDArray[Any]
Candidates = NDArray[Any]


class Workspace(NamedTuple):
    """All of it."""

    nodes: Nodes  # NODE [E], the first one the context
    taken: Int32Array  # [N], lines of the nodes that were taken, in that order
    waiting: Int32Array  # [M], lines of those that may be next: no two share a place
    paths: Float64Array  # [M], theirs
    members: Int32Array  # [(N + 2) * M], numbers of places; those of a node stand together
    candidates: Candidates  # CANDIDATE [C + 1], the last for the votes of all by source, and where rollouts end
    tokens: Int32Array  # [M], what each of the index's places goes on with
    votes: Float64Array  # [M], what each counts
    which: Int32Array  # [M], candidate of each, the one behind all where a rollout ends
    numbers: Int32Array  # [N + 1], where each index is written; of the context -1, which comes first
    sizes: Int32Array  # [N + 1], taken from each one on
    free: Int32Array  # [N + 1], where the next child of each one is written


@njit
def make_workspace() -> Workspace:
    """Room for any row."""
    orders = np.empty((3, MAX_NODES + 1), np.int32)
    return Workspace(
        np.empty((MAX_NODES + 1) * MAX_CANDIDATES, NODE),
        np.empty(MAX_NODES, np.int32),
        np.empty(MAX_MATCHES, np.int32),
        np.empty(MAX_MATCHES, np.float64),
        np.empty(NOWHERE + MAX_MATCHES, np.int32),
        np.empty(MAX_CANDIDATES + 1, CANDIDATE),
        np.empty(MAX_MATCHES, np.int32),
        np.empty(MAX_MATCHES, np.float64),
        np.empty(MAX_MATCHES, np.int32),
        orders[0],
        orders[1],
        orders[2],
    )
