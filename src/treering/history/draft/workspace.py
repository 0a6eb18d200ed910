"""Memory for one row's draft while it grows: allocated once per drafter and overwritten by every row.

All fields of a record lie side by side, so that one address leads to them: an array per field would need more addresses
than there are registers.

    N tokens of a draft   M matches   C candidates of one node   E nodes ever made
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treering.arrays import Float64Array, Int32Array
from treering.history.features import NUM_KINDS, NUM_SOURCES, NUM_VOTES
from treering.history.jit import Memory
from treering.history.match.matches import MAX_MATCHES

MAX_NODES = 64
MAX_CANDIDATES = 12
NO_NODE = (MAX_NODES + 1) * MAX_CANDIDATES - 1
"""Sentinel row of the nodes: written when a candidate has no node."""
NOWHERE = (MAX_NODES + 1) * MAX_MATCHES
"""Where the sentinel's matches are written among the members: after those of all nodes."""

NODE = np.dtype(
    [
        ("token", np.int32),
        ("parent", np.int32),  # index among the taken nodes, -1 for none
        ("depth", np.int32),  # tokens of the draft before it
        ("longest", np.int32),  # of its matches
        ("begin", np.int32),  # where its matches begin among the members
        ("end", np.int32),
        ("path", np.float64),  # probability that it and all before it are accepted
        ("estimate", np.float32),
        ("shares", np.float32, (NUM_VOTES,)),
        ("features", np.int32, (NUM_KINDS,)),
    ],
    align=True,
)
"""A candidate that is likely enough to be drafted. The draft consists of the nodes that are taken."""

CANDIDATE = np.dtype(
    [
        ("token", np.int32),
        ("count", np.int32),  # matches that continue with it
        ("best", np.int32),  # the match with the greatest vote
        ("length", np.int32),  # longest match
        ("num_longest", np.int32),  # matches as long as the node's longest
        ("line", np.int32),  # its node, NO_NODE for none
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
    """The arrays."""

    nodes: Nodes  # NODE [E], the first one the context
    taken: Int32Array  # [N], lines of the nodes that make up the draft, in the order in which they were taken
    waiting: Int32Array  # [M], lines of the nodes that may be taken next: no two share a match
    paths: Float64Array  # [M], theirs
    members: Int32Array  # [(N + 2) * M], numbers of matches; those of a node stand together
    candidates: Candidates  # CANDIDATE [C + 1], the last for the votes of all by source, and where rollouts end
    tokens: Int32Array  # [M], what each of the node's matches continues with
    votes: Float64Array  # [M], what each counts
    which: Int32Array  # [M], candidate of each, the last one where a rollout ends
    numbers: Int32Array  # [N + 1], where each taken node is written; -1 for the context, which comes first
    sizes: Int32Array  # [N + 1], nodes of each one's subtree
    free: Int32Array  # [N + 1], where the next child of each one is written


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
"""Memory for any row."""
