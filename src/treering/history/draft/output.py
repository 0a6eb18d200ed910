"""What the compiled call writes: the drafts of all rows, one after another.

B rows   D drafted tokens
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import BoolArray, Float32Array, Float64Array, Int32Array, Int64Array
from treering.compiling.lean import lean
from treering.history.budget.selection import NUM_BINS, bin_of, choose_bins
from treering.history.draft.workspace import MAX_NODES, Workspace
from treering.history.features import NUM_KINDS, NUM_VOTES
from treering.history.jit import Memory, copy_entries


class Output(NamedTuple):
    """Drafts of all rows, one after another; see `Drafts`."""

    offsets: Int64Array  # [B + 1]
    tokens: Int32Array  # [D]
    parents: Int32Array  # [D]
    estimates: Float32Array  # [D]
    paths: Float64Array  # [D]
    shares: Float32Array  # [D, votes]
    features: Int32Array  # [D, kinds]
    is_probe: BoolArray  # [B], rows whose only token is drafted although its estimate is too low


@lean
def write_row(output: Output, at: int, workspace: Workspace, num_nodes: int) -> None:
    """Writes a row's nodes from `at` on, each one's likeliest child right after it."""
    nodes, taken, numbers = workspace.nodes, workspace.taken, workspace.numbers
    _preorder(workspace, num_nodes)
    for index in range(num_nodes):
        node, k = nodes[np.uintp(taken[index])], np.uintp(at + numbers[index + 1])
        output.tokens[k], output.estimates[k], output.paths[k] = node.token, node.estimate, node.path
        output.parents[k] = numbers[node.parent + 1]
        copy_entries(output.shares, k, node.shares, NUM_VOTES)
        copy_entries(output.features, k, node.features, NUM_KINDS)


@lean
def _preorder(workspace: Workspace, num_nodes: int) -> None:
    """Numbers the nodes so that each one's likeliest child comes right after it; line 0 is the context, number -1.

    Nodes are in order of falling probability, so a node's first child is its likeliest.
    """
    nodes, taken, numbers, sizes, free = (
        workspace.nodes,
        workspace.taken,
        workspace.numbers,
        workspace.sizes,
        workspace.free,
    )
    for index in range(num_nodes):
        sizes[np.uintp(index + 1)] = 1
    for index in range(num_nodes - 1, -1, -1):
        sizes[np.uintp(nodes[np.uintp(taken[index])].parent + 1)] += sizes[np.uintp(index + 1)]
    numbers[0], free[0] = -1, 0
    for index in range(num_nodes):
        line = np.uintp(nodes[np.uintp(taken[index])].parent + 1)
        numbers[index + 1] = free[line]
        free[index + 1] = free[line] + 1
        free[line] += sizes[index + 1]


class Bins(NamedTuple):
    """Scratch of `cut`."""

    counts: Float64Array  # [bins], drafted tokens
    gains: Float64Array  # [bins], sums of their probabilities, times their rows' worth
    renamed: Int32Array  # [nodes], the new number of each of a row's tokens


BINS = Memory(Bins, counts=(np.float64, NUM_BINS), gains=(np.float64, NUM_BINS), renamed=(np.int32, MAX_NODES))


@lean
def cut(worth: Float64Array, output: Output, sizes: Int64Array, seconds: Float64Array, bins: Bins) -> float:
    """Drops drafted tokens that do not pay.

    Returns the lowest path probability kept, or 0.0 if nothing was dropped or nothing was kept (probe rows do not
    count), because then the cutoff is unknown. Rows worth 0 are duplicates: they have no draft and no token in a pass.
    """
    counts, gains, renamed = bins
    for k in range(NUM_BINS):
        counts[k] = gains[k] = 0.0
    num_computed, most = 0, 1.0
    for b in range(worth.size):
        num_computed += worth[b] > 0
        most = max(most, worth[b])
    for b in range(worth.size):
        for i in range(output.offsets[b], output.offsets[b + 1]):
            k = bin_of(output.paths[i] * worth[b] / most)
            counts[k] += 1
            gains[k] += output.paths[i] * worth[b]
    # Gains of all rows, per row with a token in the pass.
    for k in range(NUM_BINS):
        gains[k] = gains[k] * num_computed / worth.size
    num_bins = choose_bins(num_computed, counts, gains, sizes, seconds)
    least, num_out, begin = np.inf, 0, output.offsets[0]
    has_cut = False
    for b in range(worth.size):
        end, num_before = output.offsets[b + 1], num_out
        for i in range(begin, end):
            if bin_of(output.paths[i] * worth[b] / most) >= num_bins:
                has_cut |= not output.is_probe[b]
                continue
            if not output.is_probe[b]:
                least = min(least, output.paths[i])
            renamed[i - begin] = num_out - num_before
            parent = output.parents[i]
            output.tokens[num_out], output.estimates[num_out] = output.tokens[i], output.estimates[i]
            output.parents[num_out] = renamed[parent] if parent >= 0 else -1
            output.paths[num_out] = output.paths[i]
            for j in range(NUM_VOTES):
                output.shares[num_out, j] = output.shares[i, j]
            for j in range(NUM_KINDS):
                output.features[num_out, j] = output.features[i, j]
            num_out += 1
        begin = end
        output.offsets[b + 1] = num_out
    return least if has_cut and least < np.inf else 0.0
