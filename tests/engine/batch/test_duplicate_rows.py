"""Duplicate rows are computed once without changing results (law 5)."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tests.engine.speculation.scripted_drafts import ScriptedDrafter, Tree
from tests.engine.test_torch_engine import Rollouts, assert_same, drafter_of, group_requests, run
from tests.models import VOCAB
from treering.engine.batch.rows import BatchState, make_columns
from treering.engine.batch.step_inputs import leaders_of
from treering.engine.batch.token_batch import TokenBatch
from treering.engine.protocol import Request, Sampling
from treering.engine.torch_engine import TorchEngine
from treering.history.draft.drafter import Drafter

NUM_PROMPTS, GROUP_SIZE, MAX_TOKENS = 5, 6, 20
# Cold enough that siblings agree for some tokens, warm enough that most of them diverge.
SAMPLING = {"temperature": 0.1, "stop_tokens": (7,)}


def requests_of(**options: object) -> list[Request]:
    return group_requests(NUM_PROMPTS, GROUP_SIZE, **{"max_tokens": MAX_TOKENS, **SAMPLING, **options})


def one_by_one(model: PreTrainedModel, requests: list[Request]) -> Rollouts:
    """Run one row per batch, the plain path, which has no duplicates."""
    return run(TorchEngine(model, max_batch=1, backend="plain"), requests)


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> Rollouts:
    return one_by_one(model, requests_of())


def branching(rollouts: Rollouts) -> ScriptedDrafter:
    """Return a drafter of every continuation in the prompt's rollouts, after a wrong first token."""

    def tree_of(prompt_id: str, so_far: list[int], max_drafts: int) -> Tree:
        tokens, parents, nodes = [(VOCAB - 1)], [-1], {(): -1}
        for (prompt, _, _), rollout in rollouts.items():
            own = rollout.tokens.tolist()
            if prompt != prompt_id or own[: len(so_far)] != so_far:
                continue
            following = own[len(so_far) : len(so_far) + 4]
            for depth in range(1, len(following) + 1):
                path = tuple(following[:depth])
                if path not in nodes:
                    tokens, parents = [*tokens, path[-1]], [*parents, nodes[path[:-1]]]
                    nodes[path] = len(tokens) - 1
        return tokens[:max_drafts], parents[:max_drafts]

    return ScriptedDrafter(tree_of)


def drafter_for(drafting: str, rollouts: Rollouts) -> Drafter | None:
    if drafting == "none":
        return None
    return branching(rollouts) if drafting == "branching" else drafter_of(rollouts, min_acceptance=0.01)


@pytest.mark.parametrize(
    ("drafting", "backend", "max_batch"),
    [("none", "fused", 30), ("history", "fused", 4), ("branching", "fused", 30), ("branching", "plain", 9)],
)
def test_rollouts_equal_those_of_separate_rows(
    model: PreTrainedModel, plain: Rollouts, drafting: str, backend: str, max_batch: int
) -> None:
    requests = requests_of()
    np.random.default_rng(max_batch).shuffle(requests)
    engine = TorchEngine(model, drafter_for(drafting, plain), max_batch=max_batch, backend=backend)
    assert_same(run(engine, requests), plain)
    # Duplicate rows diverge at some point and continue from what their leaders computed.
    assert 0 < engine.stats.num_duplicate_rows < engine.stats.num_rows
    assert (engine.stats.num_accepted > 0) == (drafting != "none")
    assert engine.stats.acceptance <= 1.0
    assert engine.stats.num_sampled == sum(rollout.num_tokens for rollout in plain.values())


def test_a_pass_computes_each_context_once(model: PreTrainedModel) -> None:
    engine = TorchEngine(model, max_batch=GROUP_SIZE)
    decoder, table = engine._decoder, engine._table
    computed, contexts, compute = 0, 0, decoder.run

    def counted(batch: TokenBatch) -> object:
        nonlocal computed, contexts
        c = table.columns
        computed += batch.num_tokens
        contexts += len({c.tokens[row, : c.num_tokens[row]].tobytes() for row in range(table.num_rows)})
        return compute(batch)

    decoder.run = counted
    # One prompt of one token, so that nothing is prefilled.
    run(engine, requests_of()[:GROUP_SIZE])
    assert computed == contexts == engine.stats.num_rows - engine.stats.num_duplicate_rows
    assert engine.stats.num_duplicate_rows > engine.stats.num_forwards
    assert engine.stats.num_prefilled == 0


def test_rows_that_are_not_shared_are_computed_one_by_one(model: PreTrainedModel, plain: Rollouts) -> None:
    engine = TorchEngine(model, drafter_of(plain), max_batch=GROUP_SIZE)
    engine.shares_rows = False
    assert_same(run(engine, requests_of()), plain)
    assert engine.stats.num_duplicate_rows == 0
    engine.shares_rows = True
    run(engine, requests_of(draw=1))
    assert engine.stats.num_duplicate_rows > 0


@pytest.mark.parametrize("drafting", ["none", "branching"])
def test_duplicate_rows_may_have_different_sampling_parameters_and_limits(
    model: PreTrainedModel, drafting: str
) -> None:
    prompt = np.array([3, 9, 4], np.int32)
    ways = [
        Sampling(max_tokens=length, temperature=temperature, top_k=top_k, top_p=top_p, stop_tokens=stop)
        for length, temperature, top_k, top_p, stop in [
            (20, 0.1, None, 1.0, ()),
            (3, 0.1, None, 1.0, ()),
            (20, 0.3, 2, 1.0, (7, 8)),
            (9, 0.1, None, 0.6, tuple(range(16))),
            (20, 1.5, None, 1.0, ()),
            (1, 0.1, None, 1.0, ()),
        ]
    ]
    # Two prompt ids with the same tokens are duplicates too.
    requests = [
        Request(prompt_id=f"p{sample % 2}", prompt=prompt, sampling=way, sample=sample)
        for sample, way in enumerate(ways)
    ]
    expected = one_by_one(model, requests)
    for order in (requests, requests[::-1]):
        engine = TorchEngine(model, drafter_for(drafting, expected), max_batch=6)
        assert_same(run(engine, order), expected)
        assert engine.stats.num_duplicate_rows >= 5


@pytest.mark.parametrize("limit", [2, 3, 6, 7, 8, 9])
def test_a_duplicate_that_ends_inside_its_leaders_draft_writes_nothing_past_its_span(
    model: PreTrainedModel, limit: int
) -> None:
    requests = [
        Request(prompt_id=name, prompt=prompt, sampling=Sampling(max_tokens=max_tokens, top_k=1), sample=sample)
        for name, prompt, max_tokens, sample in (
            ("q", [3, 9], 20, 0),
            ("q", [3, 9], limit, 1),
            # A prompt of one token needs no span, so this row's span follows the shorter one's.
            ("other", [4], 20, 0),
        )
    ]
    expected = one_by_one(model, requests)
    engine = TorchEngine(model, branching(expected), max_batch=3)
    assert_same(run(engine, requests), expected)
    assert engine.stats.num_duplicate_rows > 0


@pytest.mark.parametrize("drafting", ["none", "history"])
def test_a_removed_leader_leaves_its_keys_and_values_to_its_duplicates(
    model: PreTrainedModel, plain: Rollouts, drafting: str
) -> None:
    requests = requests_of()[-GROUP_SIZE:]
    engine = TorchEngine(model, drafter_for(drafting, plain), max_batch=GROUP_SIZE)
    engine.submit(requests)
    finished, before = engine.step(), engine.stats.num_duplicate_rows
    assert before == GROUP_SIZE - 1
    aborted = engine.abort([requests[0].key])
    while engine.num_unfinished:
        finished += engine.step()
    assert_same({r.key: r for r in finished}, {r.key: plain[r.key] for r in requests if r.key != aborted[0].key})


ROWS = st.tuples(
    st.integers(0, 3),  # the prompt
    st.lists(st.sampled_from([1, 6]), max_size=4),  # the rollout
    st.booleans(),  # is the prompt computed
    st.integers(1, 2),  # missing tokens
)
# Prompt -> start of its span. The tokens also occur in rollouts, so that contexts partly agree.
PROMPTS = {(5,): 0, (8, 6): 0, (9, 6): 4, (8, 6, 6): 7}


def columns_of(rows: list[tuple[int, list[int], bool, int]]) -> BatchState:
    c = make_columns(max_rows=len(rows) + 2, max_context=12, max_stops=1)
    for row, (number, rollout, is_ready, num_missing) in enumerate(rows):
        prompt, start = [*PROMPTS.items()][number]
        context = [*prompt, *rollout]
        c.tokens[row, : len(context)] = context
        c.num_tokens[row], c.num_prefix[row] = len(context), len(prompt) - 1
        c.num_computed[row] = len(context) - min(num_missing, 1 + len(rollout))
        c.prefix_start[row], c.is_ready[row] = start, is_ready
    return c


@given(st.lists(ROWS, max_size=12))
@example([(0, [6], True, 1), (1, [], True, 1)])
def test_the_leader_is_the_first_row_with_the_same_tokens(rows: list[tuple[int, list[int], bool, int]]) -> None:
    kinds = [
        (number, tuple(rollout)) if is_ready and min(num_missing, 1 + len(rollout)) == 1 else row
        for row, (number, rollout, is_ready, num_missing) in enumerate(rows)
    ]
    columns = columns_of(rows)
    assert leaders_of(columns, len(rows)).tolist() == [kinds.index(kind) for kind in kinds]
