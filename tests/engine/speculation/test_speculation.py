"""What an engine passes to its drafter besides contexts: row weights, feedback and costs."""

from collections.abc import Mapping

import numpy as np
import pytest
from transformers import PreTrainedModel

from tests.engine.speculation.scripted_drafts import ScriptedDrafter, Tree, chain
from tests.models import build
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


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build().double()


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


def test_row_weights_follow_expected_lengths_once_nothing_waits(model: PreTrainedModel) -> None:
    drafter = Watching(store_of({"p0": [40, 60, 200], "p1": [9, 11]}))
    run(TorchEngine(model, drafter, max_batch=4, costs="none"), requests_of(max_tokens=60))
    worths = [rows.worth for rows, _ in drafter.seen]
    first = next(number for number, worth in enumerate(worths) if worth is not None)
    assert first > 0
    assert all(worth is None for worth in worths[:first])
    assert all(worth is not None for worth in worths[first:])
    rows, num_tokens = drafter.seen[first]
    assert len(rows.prompt_ids) == 4
    written = np.array(num_tokens) - 2
    usual = np.array([60.0 if prompt_id == "p0" else 10.0 for prompt_id in rows.prompt_ids])
    expected = np.minimum(np.maximum(usual - written, np.maximum(written / 4, 1)), 60 - written)
    assert rows.worth == pytest.approx(np.clip(expected / expected.mean(), 0.5, 4.0))


def test_row_weights_are_updated_when_a_row_leaves(model: PreTrainedModel) -> None:
    drafter = Watching(store_of({"p0": [12], "p1": [20]}))
    engine = TorchEngine(model, drafter, max_batch=6, costs="none")
    requests = requests_of()
    run(engine, [*requests[:5], Request(prompt_id="p9", prompt=requests[0].prompt, sampling=Sampling(max_tokens=4))])
    seen = {id(rows): rows for rows, _ in drafter.seen}
    assert [len(rows.prompt_ids) for rows in seen.values()][:2] == [6, 5]
    left = next(rows for rows in seen.values() if len(rows.prompt_ids) == 5)
    assert left.worth is not None
    assert left.worth.mean() == pytest.approx(1.0)


def test_rows_are_weighted_once_no_request_waits(model: PreTrainedModel) -> None:
    drafter = Watching(store_of({"p0": [12], "p1": [20]}))
    engine = TorchEngine(model, drafter, max_batch=4, costs="none")
    requests = requests_of()
    engine.submit(requests)
    engine.step()
    engine.abort([request.key for request in requests[4:]])
    engine.step()
    assert [rows.worth is None for rows, _ in drafter.seen] == [True, False]


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


def test_a_stop_token_inside_a_draft_is_not_reported_as_a_cut_off(model: PreTrainedModel) -> None:
    request = requests_of()[0]
    free = run(TorchEngine(model), [request])
    tokens = free[request.key].tolist()
    stop = next(token for number, token in enumerate(tokens) if number >= 4 and token not in tokens[:number])
    stopped = Sampling(max_tokens=24, stop_tokens=(stop,))
    drafter = truth_of(free)
    requests = [Request(prompt_id=request.prompt_id, prompt=request.prompt, sampling=stopped)]
    rollouts = run(TorchEngine(model, drafter, costs="none"), requests)
    size = tokens.index(stop) + 1
    assert rollouts[request.key].tolist() == tokens[:size]
    feedback = [step for step in drafter.seen if "accepted" in step]
    drafts, leaf = feedback[-1]["drafts"], int(feedback[-1]["leaves"][0])
    # The stop token was drafted and accepted, others followed it, and the feedback marks no cut-off.
    assert drafts.tokens[leaf] == stop
    assert feedback[-1]["accepted"].tolist() == [size - sum(int(step["accepted"][0]) + 1 for step in feedback[:-1])]
    assert (drafts.parents == leaf).any()
    assert feedback[-1]["ended"] is None


def test_no_draft_exceeds_the_limit(model: PreTrainedModel) -> None:
    request = requests_of()[0]
    free = run(TorchEngine(model), [request])
    drafter = truth_of(free)
    engine = TorchEngine(model, drafter, costs="none")
    assert run(engine, [request])[request.key].tolist() == free[request.key].tolist()
    # The last token is sampled, never drafted: 23 of 24 tokens are drafted at once, and all are accepted.
    assert [step["accepted"].tolist() for step in drafter.seen if "accepted" in step] == [[23]]
    assert engine.stats.num_drafted == engine.stats.num_accepted > 0


def test_a_drafter_can_be_changed_between_two_steps(model: PreTrainedModel) -> None:
    plain = run(TorchEngine(model, max_batch=4), requests_of())
    store = HistoryStore()
    for (prompt_id, _, _), tokens in plain.items():
        store.add(prompt_id, [tokens], version=0)
    store.publish()
    engine = TorchEngine(model, max_batch=4, costs=COSTS)
    engine.submit(requests_of())
    found, drafter = {}, Watching(store)
    for number in range(200):
        engine.use_drafter(drafter if number % 3 else None)
        found.update({rollout.key: rollout.tokens.tolist() for rollout in engine.step()})
    assert found == {key: tokens.tolist() for key, tokens in plain.items()}
    assert engine.stats.num_accepted > 0
    assert drafter.costs is COSTS


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


def test_costs_are_measured_for_a_drafter_that_has_none(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[None] = []

    def measure(self: TorchEngine) -> VerifyCosts:
        measured.append(None)
        return COSTS

    monkeypatch.setattr(TorchEngine, "measure_costs", measure)
    drafter, engine = Drafter(HistoryStore()), TorchEngine(model, max_batch=4)
    for _ in range(2):
        engine.use_drafter(drafter)
        run(engine, requests_of(max_tokens=2))
    assert (len(measured), drafter.costs) == (1, COSTS)


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
