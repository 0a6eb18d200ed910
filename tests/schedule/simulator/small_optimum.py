"""Find the best assignment and order of a small run by trying all of them."""

from itertools import permutations, product

from tests.schedule.simulator import token_by_token


def makespan(steps, *, num_workers, token_s, staleness, training_s=0.0):
    """Return the shortest time of a run of one or two steps, given as lists of lengths, without moves."""
    found = []
    for free, sampled in _outcomes(steps[0], (0.0,) * num_workers, token_s):
        trained = sampled + training_s
        if len(steps) == 1:
            found.append(trained)
            continue
        opened = trained if staleness == 0 else 0.0
        starts = tuple(max(start, opened) for start in free)
        found += [max(ended, trained) + training_s for _, ended in _outcomes(steps[1], starts, token_s)]
    return min(found)


def _outcomes(lengths, starts, token_s):
    """Return the possible end times of the workers and of the step."""
    spans, found = _spans(lengths, token_s), set()
    for split in product(range(len(starts)), repeat=len(lengths)):
        shares = [frozenset(r for r, w in enumerate(split) if w == worker) for worker in range(len(starts))]
        for choice in product(*(spans[share] for share in shares)):
            ends = tuple(start + span for start, span in zip(starts, choice, strict=True))
            found.add((ends, max(end for end, share in zip(ends, shares, strict=True) if share)))
    return found


def _spans(lengths, token_s):
    """Map each set of rollouts to the times that a worker can take for them, over all orders."""
    found = {frozenset(): {0.0}}
    for size in range(1, len(lengths) + 1):
        for order in permutations(range(len(lengths)), size):
            (span, *_), *_ = token_by_token.run([0.0], [range(size)], [lengths[r] for r in order], token_s)
            found.setdefault(frozenset(order), set()).add(span)
    return found
