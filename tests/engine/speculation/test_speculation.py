"""What an engine passes to its drafter besides contexts: row weights, feedback and costs."""

from collections.abc import Mapping

import numpy as np
import pytest
from transformers import PreTrainedModel

from tests.engine.speculation.scripted_drafts import ScriptedDrafter, Tree, chain
from treering.engine.request import Request, Sampling
from treering.engine.speculation.speculation import row_weights
from treering.engine.torch_engine import TorchEngine
from treering.history.budget.costs import DraftPrices, VerifyCosts
from treering.history.draft.drafter import Drafter
from treering.history.store.store import HistoryStore
from treering.history.types import DraftRows, Drafts
from treering.types import TokenIds

Rollouts = Mapping[tuple[str, int, int], TokenIds]
COSTS = VerifyCosts(num_tokens=np.array([1, 64]), seconds=np.array([1.0, 1.1]))


def requests_of(*, max_tokens: int = 24, stop_tokens: tuple[int, ...] = ()) -> list[Request]:
    sampling = Sampling(max_tokens=max_tokens, stop_tokens=stop_tokens)
    return [
        Request(prompt_id=f"p{prompt}", prompt=np.array([5, 6 + prompt], np.int32), sampling=sampling, sample=sample)
        for prompt in range(2)
        for sample in range(3)
    ]


def run(engine: TorchEngine, requests: list[Request]) -> Rollouts:
    return {rollout.key: rollout.tokens for rollout in engine.generate(requests)}


def store_of(lengths: Mapping[str, list[int]]) -> HistoryStore:
    store = HistoryStore()
    for prompt_id, sizes in lengths.items():
        store.add(prompt_id, [np.arange(size, dtype=np.int32) for size in sizes], version=0)
    store.publish()
    return store


class Watching(Drafter):
    """A drafter that records the rows of each call."""

    def __init__(self, store: HistoryStore) -> None:
        super().__init__(store)
        self.seen: list[tuple[DraftRows, list[int]]] = []

    def propose(self, rows: DraftRows) -> Drafts:
        self.seen.append((rows, rows.num_tokens.tolist()))
        return super().propose(rows)


def test_row_weights_change_no_rollout(model: PreTrainedModel) -> None:
    plain = run(TorchEngine(model, max_batch=4), requests_of())
    store = HistoryStore()
    for (prompt_id, _, sample), tokens in plain.items():
        store.add(prompt_id, [tokens[: 24 - 7 * sample]], version=0)
    store.publish()
    drafter = Watching(store)
    engine = TorchEngine(model, drafter, max_batch=4, costs=COSTS)
    drafted = run(engine, requests_of())
    assert {key: tokens.tolist() for key, tokens in drafted.items()} == {k: t.tolist() for k, t in plain.items()}
    assert engine.stats.num_accepted > 0
    assert any(rows.worth is not None and np.ptp(rows.worth) > 0 for rows, _ in drafter.seen)


@pytest.mark.parametrize(
    ("usual", "num_written", "num_left", "worth"),
    [
        # 30, 9.5 and 7 are expected, 15.5 on average; the last weight is clipped to 0.5.
        ([40.0, 40.0, 20.0], [10, 38, 28], [99, 99, 99], [30 / 15.5, 9.5 / 15.5, 0.5]),
        # Limited by the tokens left: 5 and 15.
        ([40.0, 40.0], [10, 25], [5, 99], [0.5, 1.5]),
        # 90 against nine rows of 1: 10 on average, and a weight of 9 is clipped to 4.
        ([90.0, *[1.0] * 9], [0] * 10, [99] * 10, [4.0, *[0.5] * 9]),
        # The length of the row in the middle is unknown.
        ([30.0, np.nan, 10.0], [0, 7, 0], [99, 99, 99], [1.5, 1.0, 0.5]),
    ],
)
def test_row_weights_are_expected_remaining_tokens_over_their_mean(
    usual: list[float], num_written: list[int], num_left: list[int], worth: list[float]
) -> None:
    found = row_weights(np.array(usual), np.array(num_written), np.array(num_left))
    assert found == pytest.approx(np.array(worth))


def test_without_known_lengths_there_are_no_weights() -> None:
    assert row_weights(np.array([np.nan, np.nan]), np.array([3, 4]), np.array([9, 9])) is None


def truth_of(rollouts: Rollouts) -> ScriptedDrafter:
    """Drafts the rest of sample 0's rollout, up to the allowed number."""

    def script(prompt_id: str, so_far: list[int], max_drafts: int) -> Tree:
        return chain(rollouts[prompt_id, 0, 0].tolist()[len(so_far) :][:max_drafts])

    return ScriptedDrafter(script)


def test_no_draft_exceeds_the_limit(model: PreTrainedModel) -> None:
    request = requests_of()[0]
    free = run(TorchEngine(model), [request])
    drafter = truth_of(free)
    engine = TorchEngine(model, drafter, costs="none")
    assert run(engine, [request])[request.key].tolist() == free[request.key].tolist()
    # The last token is sampled, never drafted: 23 of 24 tokens are drafted at once, and all are accepted.
    assert [step["accepted"].tolist() for step in drafter.seen if "accepted" in step] == [[23]]
    assert engine.stats.num_drafted == engine.stats.num_accepted > 0


def test_a_drafter_that_backs_off_is_not_called_and_changes_no_rollout(model: PreTrainedModel) -> None:
    plain = run(TorchEngine(model, max_batch=4), requests_of())
    store = HistoryStore()
    for (prompt_id, _, _), tokens in plain.items():
        store.add(prompt_id, [tokens], version=0)
    store.publish()
    # Drafts are accepted, but feedback costs as much as a thousand steps.
    expensive = VerifyCosts(num_tokens=COSTS.num_tokens, seconds=COSTS.seconds, prices=DraftPrices(learn=1000.0))
    drafter = Watching(store)
    engine = TorchEngine(model, drafter, max_batch=4, costs=expensive)
    rollouts = run(engine, requests_of())
    assert {key: tokens.tolist() for key, tokens in rollouts.items()} == {
        key: tokens.tolist() for key, tokens in plain.items()
    }
    assert engine.stats.num_accepted > 0
    assert 1 < len(drafter.seen) < engine.stats.num_forwards


def test_weights_of_new_rows_do_not_depend_on_earlier_rows(model: PreTrainedModel) -> None:
    # A continuing engine and a new one pass the same row weights to the drafter (law 8).
    store = store_of({"p0": [12], "p1": [20]})
    drafter = Watching(store)
    engine = TorchEngine(model, drafter, max_batch=8, costs="none")
    run(engine, requests_of())
    store.add("p0", [np.arange(60, dtype=np.int32)] * 5, version=1)
    store.publish()
    drafter.seen.clear()
    run(engine, requests_of())
    again = Watching(store)
    run(TorchEngine(model, again, max_batch=8, costs="none"), requests_of())
    worths = [rows.worth for rows, _ in drafter.seen]
    assert worths[0] is not None
    assert worths[0].max() > 1
    np.testing.assert_array_equal(worths[0], again.seen[0][0].worth)
