import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.simulator import token_by_token
from treering.schedule.migration import CONSOLIDATE, DRAIN, HYSTERESIS, LATE, MAX_MOVES, OFF, saved_s
from treering.schedule.simulated_step import Rules, StepRollouts, run_step
from treering.schedule.turns import Turns

# Whole seconds, so that sums and products are exact floats.
SECONDS = st.integers(1, 5).map(float)


def work_of(queues, lengths, predicted=None, prompts=None) -> StepRollouts:
    return StepRollouts(
        np.cumsum([0, *map(len, queues)]),
        np.array([rollout for queue in queues for rollout in queue], np.int64),
        np.array(lengths, np.int64),
        np.array(lengths if predicted is None else predicted, np.float64),
        np.array([0] * len(lengths) if prompts is None else prompts, np.int64),
        *Turns.of([[(length, 0.0)] for length in lengths]).parts(),
    )


def rules_of(token_s, *, prefill_s=0.0, max_tokens=1000, stealing=False, moving=OFF) -> Rules:
    return Rules(np.array(token_s, np.float64), prefill_s, float(max_tokens), stealing, moving)


@st.composite
def steps(draw, longest=9):
    """Draw queues of rollouts with lengths, predicted lengths, prompts, times and starts."""
    num_workers, num_rollouts = draw(st.integers(1, 4)), draw(st.integers(1, 10))
    queues = [[] for _ in range(num_workers)]
    for rollout in draw(st.permutations(range(num_rollouts))):
        queues[draw(st.integers(0, num_workers - 1))].append(rollout)
    lists = [draw(st.lists(st.integers(1, longest), min_size=num_rollouts, max_size=num_rollouts)) for _ in range(3)]
    # The curve may fall with more rows, as speculation allows.
    token_s = [0.0, *draw(st.lists(SECONDS, min_size=1, max_size=3))]
    starts = draw(st.lists(st.integers(0, 20).map(float), min_size=num_workers, max_size=num_workers))
    return queues, *lists, token_s, starts, float(draw(st.integers(0, 2)))


@settings(max_examples=100, deadline=None)
@given(steps())
def test_a_step_is_what_decoding_token_by_token_gives(step):
    queues, lengths, predicted, prompts, token_s, starts, prefill_s = step
    outcome = run_step(
        np.array(starts), work_of(queues, lengths, predicted, prompts), rules_of(token_s, prefill_s=prefill_s)
    )
    expected = token_by_token.run(starts, queues, lengths, token_s, prompts=prompts, prefill_s=prefill_s)
    found = (outcome.ends.tolist(), outcome.finished.tolist(), outcome.counts.tolist(), outcome.num_stolen)
    assert found == expected
    assert outcome.num_moved == 0


@settings(max_examples=150, deadline=None)
@given(steps())
def test_stealing_takes_the_first_of_the_longest_queue(step):
    queues, lengths, predicted, prompts, token_s, starts, prefill_s = step
    rules = rules_of(token_s, prefill_s=prefill_s, stealing=True)
    outcome = run_step(np.array(starts), work_of(queues, lengths, predicted, prompts), rules)
    expected = token_by_token.run(
        starts, queues, lengths, token_s, prompts=prompts, prefill_s=prefill_s, steals=predicted
    )
    found = (outcome.ends.tolist(), outcome.finished.tolist(), outcome.counts.tolist(), outcome.num_stolen)
    assert found == expected


@settings(max_examples=100, deadline=None)
@given(steps(longest=60), st.sampled_from([DRAIN, CONSOLIDATE]), st.booleans())
def test_moves_lose_no_rollout_and_gain_no_token(step, moving, stealing):
    queues, lengths, predicted, prompts, token_s, starts, prefill_s = step
    # Predict few tokens, so that many rollouts outgrow them.
    predicted = [1 + one / 10 for one in predicted]
    work, num_rollouts = work_of(queues, lengths, predicted, prompts), len(lengths)
    rules = rules_of(token_s, prefill_s=prefill_s / 100, max_tokens=60, stealing=stealing, moving=moving)
    outcome = run_step(np.array(starts), work, rules)
    earliest = min(start for start, queue in zip(starts, queues, strict=True) if queue)
    assert outcome.counts.sum() == num_rollouts
    assert 0 <= outcome.num_moved <= MAX_MOVES * num_rollouts
    assert (outcome.finished >= earliest + np.array(lengths) * min(token_s[1:]) - 1e-9).all()
    assert outcome.finished.max() <= outcome.ends.max() + 1e-9
    assert (outcome.ends >= starts).all()
    rate = max(rows / seconds for rows, seconds in enumerate(token_s) if rows)
    assert sum(lengths) <= (outcome.ends - starts).sum() * rate + 1e-6


def test_moves_do_happen_in_such_steps():
    rng = np.random.default_rng(0)
    moved = 0
    for _ in range(50):
        lengths = rng.integers(1, 60, 12)
        work = work_of([range(4), range(4, 8), range(8, 12)], lengths, rng.uniform(1, 7, 12))
        moved += run_step(np.zeros(3), work, rules_of([0, 1, 2, 3, 4], max_tokens=60, moving=DRAIN)).num_moved
    assert moved > 50


def outgrown(moving, *, prefill_s=0.0, first=(12, 100, 100, 100)):
    """Run worker 0 with 10 expected tokens per rollout.

    Workers 1 and 2 run one and two rollouts, each expected to take 300 tokens.
    """
    queues = [[0, 1, 2, 3][: len(first)], [4], [5, 6]]
    lengths = [*first, *[0] * (4 - len(first)), 200, 200, 300]
    predicted = [10, 10, 10, 10, 300, 300, 300]
    rules = rules_of([0, 1, 2, 3, 4], prefill_s=prefill_s, max_tokens=320, moving=moving)
    return run_step(np.zeros(3), work_of(queues, lengths, predicted), rules)


def test_an_outlier_moves_to_the_emptiest_worker_of_longer_ones_where_it_ends_sooner():
    stays, moves = outgrown(OFF), outgrown(DRAIN)
    # 12 tokens at 4 s, then 88 at 3 s.
    assert stays.finished[1:4].tolist() == [312] * 3
    # After 48 s one of the three moves to worker 1. Both workers run two rollouts then: 88 tokens at 2 s on either.
    assert moves.num_moved == 1
    assert moves.finished[1:4].tolist() == [224] * 3
    assert (stays.finished[4], moves.finished[4]) == (200, 288)
    assert (stays.counts.tolist(), moves.counts.tolist()) == ([4, 1, 2], [3, 2, 2])


def test_a_move_prefills_what_the_rollout_has_while_its_worker_decodes_nothing():
    moves = outgrown(DRAIN, prefill_s=0.125)
    # The prefill of 12 tokens takes 1.5 s.
    assert moves.num_moved == 1
    assert moves.finished[[2, 3]].tolist() == [224] * 2
    assert moves.finished[1] == 225.5
    assert moves.finished[4] == 288 + 1.5


def test_the_last_outlier_of_a_share_leaves_for_the_fullest_worker_and_frees_its_own():
    queues, lengths, predicted = [[0, 1, 2], [3], [4, 5]], [12, 12, 100, 200, 200, 300], [10, 10, 10, 300, 300, 300]
    found = {}
    for moving in (OFF, DRAIN):
        rules = rules_of([0, 1, 2, 3, 4], max_tokens=320, moving=moving)
        found[moving] = run_step(np.zeros(3), work_of(queues, lengths, predicted), rules)
    # If it stays, it ends after 36 + 88 s; on any other worker it ends later.
    assert found[OFF].ends[0] == 124
    assert (found[DRAIN].ends[0], found[DRAIN].num_moved) == (36, 1)
    assert found[DRAIN].counts.tolist() == [2, 1, 3]
    # Worker 2 had 18 tokens by then; three rollouts take 3 s per token.
    assert found[DRAIN].finished[2] == 36 + 88 * 3


def gathered(prefill_s=0.0):
    work = work_of([[0, 1, 2], [3, 4]], [12, 12, 100, 150, 200])
    return run_step(np.zeros(2), work, rules_of([0, 1, 1, 1], prefill_s=prefill_s, moving=CONSOLIDATE))


def test_a_worker_gives_the_last_tenth_of_its_share_to_the_one_that_has_the_most_left():
    outcome = gathered()
    assert (outcome.ends[0], outcome.num_moved) == (12, 1)
    assert outcome.counts.tolist() == [2, 3]
    # Three rows take no longer than two here.
    assert outcome.finished.tolist() == [12, 12, 100, 150, 200]


def test_a_tail_stays_where_its_prefill_takes_as_long_as_the_worker_would_be_held():
    # Moving frees 88 s of a worker and costs 1.25 times the prefill of 12 tokens.
    assert gathered(88 / 15 - 0.01).num_moved == 1
    assert gathered(88 / 15 + 0.01).num_moved == 0


def test_slots_that_moves_leave_are_filled_at_once():
    queues, lengths = [[0, 1, 2, 3, 4], [5]], [12, 100, 100, 100, 50, 300]
    work = work_of(queues, lengths, [10, 10, 10, 10, 10, 300])
    outcome = run_step(np.zeros(2), work, rules_of([0, 1, 2, 3], max_tokens=320, moving=DRAIN))
    # After 36 s rollout 0 ends, 3 starts, 1 moves, and 4 starts: 50 tokens at 3 s. The worker's last rollout moves too.
    assert outcome.num_moved == 2
    assert outcome.finished[[0, 4]].tolist() == [36, 186]


def test_a_rollout_moves_with_tails_a_few_times_and_then_stays():
    """Worker k has 20 rollouts of 100 (k + 1) tokens; one of worker 0 is long and would move with every tail."""
    queues = [list(range(20 * k, 20 * (k + 1))) for k in range(8)]
    lengths = [100 * (k + 1) for k in range(8) for _ in range(20)]
    lengths[0] = 5000
    work = work_of(queues, lengths)
    outcome = run_step(np.zeros(8), work, rules_of([0.0, *[1.0] * 40], max_tokens=6000, moving=CONSOLIDATE))
    assert outcome.num_moved == MAX_MOVES
    assert outcome.counts.tolist() == [19, 20, 20, 20, 21, 20, 20, 20]
    assert outcome.finished[0] == 5000


STEPS = 20 + 0.05 * np.arange(129)


def saved(generated, *, predicted=8000.0, max_tokens=16384.0, here=128, there=39, prefill_s=0.1, context=None):
    return saved_s(float(generated), predicted, max_tokens, here, there, STEPS, prefill_s, float(context or generated))


def test_the_example():
    # 2,500 more tokens at 22.0 instead of 26.4 s, for a prefill of 10,000 tokens.
    assert saved(10_000) == pytest.approx(2500 * 4.4 - 1.25 * 1000)


def test_a_rollout_within_its_prediction_stays():
    assert saved(LATE * 8000 - 1) == 0
    assert saved(LATE * 8000 + 1) > 0


def test_a_rollout_far_beyond_its_prediction_is_expected_to_run_as_long_again():
    # The rollout is 4,000 beyond a prediction of 6,000, so 4,000 more are expected, not a quarter of 10,000.
    assert saved(10_000, predicted=6000.0, prefill_s=0.0) == pytest.approx(4000 * 4.4)


def test_a_move_saves_more_than_it_costs_by_a_margin():
    costs = 2500 * 4.4 / HYSTERESIS / 10_000
    assert saved(10_000, prefill_s=costs * 1.001) < 0 < saved(10_000, prefill_s=costs * 0.999)
    # The prompt is prefilled too.
    assert saved(10_000, context=20_000) == pytest.approx(2500 * 4.4 - 1.25 * 2000)
