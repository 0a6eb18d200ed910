import numpy as np
import pytest
from benchmarks.draft.histories import plans
from benchmarks.draft.replay import replay_chains

from tests.benchmarks.draft.recordings import recording
from treering.analysis.recording import Recorded
from treering.arrays import Int32Array, Int64Array


class Parrot:
    """Draft what a table says for each context length, and record the contexts."""

    def __init__(self, drafts: dict[int, list[int]]) -> None:
        self._drafts = drafts
        self.num_bytes = 0
        self.contexts: list[list[int]] = []
        self.observed: list[tuple[int, int, bool]] = []

    def start(self, recorded: Recorded, sources: Int64Array) -> None:
        self.num_bytes = 10 * sources.size

    def propose(self, context: Int32Array) -> Int32Array:
        self.contexts.append(context.tolist())
        return np.array(self._drafts.get(context.size, []), np.int32)

    def observe(self, num_drafted: int, num_accepted: int, is_rejected: bool) -> None:
        self.observed.append((num_drafted, num_accepted, is_rejected))


def test_a_step_emits_what_agrees_and_one_token_more_within_the_sampled_run() -> None:
    found = recording([("a", [1, 2, 3, 4, 5, 6, 7, 8], "01111011")])
    # After 1: two right and a wrong token. After 1..4: the run's last, and more than the run. Then nothing.
    parrot = Parrot({1: [2, 3, 9], 4: [5, 6, 7], 6: []})
    row = replay_chains(found, plans(found)["none"], parrot, lambda done: None)
    assert parrot.contexts == [[1], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]]
    assert parrot.observed == [(3, 2, True), (3, 1, False), (0, 0, False), (0, 0, False)]
    assert (row["tokens_per_step"], row["drafted_per_step"], row["precision"]) == (6 / 4, 6 / 4, 3 / 6)


def test_every_sampled_token_is_emitted_once_whatever_is_drafted() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        masks = ["".join(generator.choice(["0", "1"], size=9)) for _ in range(4)]
        found = recording([("a", list(range(10)), mask + "1") for mask in masks])
        drafts = {size: [*range(size, size + int(generator.integers(4))), 77] for size in range(10)}
        parrot = Parrot(drafts)
        row = replay_chains(found, plans(found)["none"], parrot, lambda done: None)
        assert row["tokens_per_step"] * len(parrot.observed) == pytest.approx(found.lengths.sum())
