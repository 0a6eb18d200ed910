import numpy as np
import pytest
from benchmarks.draft.histories import plans
from benchmarks.draft.recording import Recording
from benchmarks.draft.replay import Tally, agreement, emitted, replay_chains

from tests.benchmarks.draft.recordings import recording
from treering.arrays import Int32Array, Int64Array


class Parrot:
    """Drafts what it is told at each context length, and notes what it sees."""

    def __init__(self, drafts: dict[int, list[int]]) -> None:
        self._drafts = drafts
        self.num_bytes = 0
        self.contexts: list[list[int]] = []
        self.observed: list[tuple[int, int, bool]] = []

    def start(self, recording: Recording, sources: Int64Array) -> None:
        self.num_bytes = 10 * sources.size

    def propose(self, context: Int32Array) -> Int32Array:
        self.contexts.append(context.tolist())
        return np.array(self._drafts.get(context.size, []), np.int32)

    def observe(self, num_drafted: int, num_accepted: int, is_rejected: bool) -> None:
        self.observed.append((num_drafted, num_accepted, is_rejected))


def test_a_step_emits_what_agrees_and_one_token_more_within_the_sampled_run() -> None:
    found = recording([("a", [1, 2, 3, 4, 5, 6, 7, 8], "01111011")])
    # Behind 1 two right and a wrong one; behind 1..4 the run's last, and more than the run; then nothing.
    parrot = Parrot({1: [2, 3, 9], 4: [5, 6, 7], 6: []})
    tally = replay_chains(found, plans(found)["none"], parrot, lambda done: None)
    assert parrot.contexts == [[1], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]]
    assert parrot.observed == [(3, 2, True), (3, 1, False), (0, 0, False), (0, 0, False)]
    assert (tally.num_steps, tally.num_emitted, tally.num_drafted, tally.num_accepted) == (4, 6, 6, 3)
    assert len(tally.propose_us) == 4


def test_every_sampled_token_is_emitted_once_whatever_is_drafted() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        masks = ["".join(generator.choice(["0", "1"], size=9)) for _ in range(4)]
        found = recording([("a", list(range(10)), mask + "1") for mask in masks])
        drafts = {size: [*range(size, size + int(generator.integers(4))), 77] for size in range(10)}
        tally = replay_chains(found, plans(found)["none"], Parrot(drafts), lambda done: None)
        assert tally.num_emitted == found.num_sampled
        assert tally.num_accepted + tally.num_steps >= tally.num_emitted


def test_trees_are_walked_along_the_recording() -> None:
    found = recording([("a", [1, 7, 8, 9], "0111"), ("a", [1, 7, 8, 9], "0110")])
    #        -1 -> 6, 7;  7 -> 6, 8;  6 -> 8;  8 -> 9
    tokens = np.array([6, 7, 6, 8, 8, 9], np.int32)
    parents = np.array([-1, -1, 1, 0, 1, 4], np.int32)
    offsets, places = np.array([0, 6, 12], np.int64), np.array([1, 5], np.int64)
    both = np.concatenate([tokens, tokens]), offsets, np.concatenate([parents, parents])
    accepted, leaves = agreement(found, places, *both)
    assert accepted.tolist() == [3, 2]  # the second rollout's 9 was not sampled
    assert leaves.tolist() == [5, 4]
    counts, ended = emitted(found, places, accepted)
    assert counts.tolist() == [3, 2]
    assert ended.tolist() == [True, True]
    none, nowhere = agreement(found, places, tokens[:0], np.zeros(3, np.int64), parents[:0])
    assert (none.tolist(), nowhere.tolist()) == ([0, 0], [-1, -1])


def test_rates_are_per_step_and_bytes_per_token_of_history() -> None:
    tally = Tally(num_steps=2, num_emitted=5, num_drafted=6, num_accepted=3)
    for taken_us in (1.0, 2.0, 9.0):
        tally.add_time(taken_us, 1)
    assert tally.row() == {
        "tokens_per_step": 2.5,
        "drafted_per_step": 3.0,
        "precision": 0.5,
        "us_per_row": 2.0,
        "us_per_row_p95": pytest.approx(8.3),
        "bytes_per_token": 0.0,
    }
    found = recording([("a", [1, 2, 3], "011"), ("a", [1, 2], "01")])
    tally = replay_chains(found, plans(found, siblings="others")["siblings"], Parrot({}), lambda done: None)
    assert tally.bytes_per_token == pytest.approx(20 / 3)


def test_every_row_counts_alike_with_its_share_of_its_call() -> None:
    tally = Tally()
    # One by one, 31, 31 and 31 us; together, 3 us for each of 4 rows and 5 us for each of 2.
    for taken_us, num_rows in ((31.0, 1), (12.0, 4), (31.0, 1), (10.0, 2), (31.0, 1)):
        tally.add_time(taken_us, num_rows)
    assert tally.propose_us == [31.0, 3.0, 31.0, 5.0, 31.0]
    assert tally.row()["us_per_row"] == 5.0
    assert tally.row()["us_per_row_p95"] == 31.0
    assert Tally().row()["us_per_row"] == 0.0
