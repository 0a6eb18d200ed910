"""What an engine passes to its drafter besides contexts: limits, feedback and costs."""

from collections.abc import Mapping

import numpy as np
from transformers import PreTrainedModel

from tests.engine.speculation.scripted_drafts import ScriptedDrafter, Tree, chain
from treering.engine.request import Request, Sampling
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


class Watching(Drafter):
    """A drafter that records the rows of each call."""

    def __init__(self, store: HistoryStore) -> None:
        super().__init__(store)
        self.seen: list[tuple[DraftRows, list[int]]] = []

    def propose(self, rows: DraftRows) -> Drafts:
        self.seen.append((rows, rows.num_tokens.tolist()))
        return super().propose(rows)


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
