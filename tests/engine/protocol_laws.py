"""The laws of the engine protocol as functions of an engine factory: `for law in LAWS: law(make)`.

`make(max_batch)` returns a new engine of version 0 with that many rows. All its engines are identical, compute in
float64, know the token ids 1 to 15, have no default stop tokens, and keep their weights on `update_weights`. So a
request gets the same tokens from each of them, whatever else is running.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import pytest

from treering.engine.protocol import Engine, FinishReason, Request, Rollout, RolloutKey, Sampling, WhenRunning
from treering.errors import InputError

MAX_TOKENS = 24
"""Tokens of a rollout: more than two steps produce, with or without drafts."""


class MakeEngine(Protocol):
    def __call__(self, max_batch: int) -> Engine: ...


def request_of(
    sample: int,
    *,
    max_tokens: int = MAX_TOKENS,
    stop_tokens: tuple[int, ...] = (),
    so_far: Rollout | None = None,
    prompt: Sequence[int] = (3, 1, 4, 1, 5),
) -> Request:
    sampling = Sampling(max_tokens=max_tokens, stop_tokens=stop_tokens)
    tokens = np.array(prompt, np.int32)
    return Request(prompt_id="p", prompt=tokens, sampling=sampling, draw=2, sample=sample, so_far=so_far)


def run(engine: Engine, requests: Sequence[Request]) -> dict[RolloutKey, Rollout]:
    finished = list(engine.generate(requests))
    assert len(finished) == len({rollout.key for rollout in finished})
    return {rollout.key: rollout for rollout in finished}


def run_alone(make: MakeEngine, request: Request) -> Rollout:
    (rollout,) = make(max_batch=1).generate([request])
    return rollout


def run_on(engine: Engine) -> dict[RolloutKey, Rollout]:
    return run(engine, [])


def assert_equal(actual: Rollout, expected: Rollout) -> None:
    assert (actual.key, actual.finish_reason) == (expected.key, expected.finish_reason)
    assert actual.tokens.tolist() == expected.tokens.tolist()
    assert actual.loss_mask.tolist() == expected.loss_mask.tolist()
    np.testing.assert_allclose(actual.logprobs, expected.logprobs, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(actual.policy_logprobs, expected.policy_logprobs, rtol=1e-9, atol=1e-12)


def assert_begins(rollout: Rollout, whole: Rollout, finish_reason: FinishReason) -> None:
    assert (rollout.key, rollout.finish_reason) == (whole.key, finish_reason)
    assert rollout.tokens.tolist() == whole.tokens[: rollout.num_tokens].tolist()


def an_idle_engine_returns_nothing(make: MakeEngine) -> None:
    engine = make(max_batch=2)
    assert (engine.version, engine.num_unfinished, engine.step(), list(engine.generate([]))) == (0, 0, [], [])
    engine.submit([])
    assert (engine.step(), engine.stats.num_forwards) == ([], 0)


def generate_yields_every_rollout_once(make: MakeEngine) -> None:
    engine = make(max_batch=2)
    finished = run(engine, [request_of(i) for i in range(5)])
    assert set(finished) == {("p", 2, i) for i in range(5)}
    assert all(rollout.reward is None for rollout in finished.values())
    assert (engine.num_unfinished, engine.step()) == (0, [])


def closing_generate_aborts_its_requests(make: MakeEngine) -> None:
    engine = make(max_batch=2)
    other = request_of(9)
    engine.submit([other])
    listening = engine.generate([request_of(i, max_tokens=2 + i) for i in range(4)])
    next(listening)
    listening.close()
    assert set(run_on(engine)) <= {other.key}
    assert engine.num_unfinished == 0


def requests_come_from_any_iterable(make: MakeEngine) -> None:
    engine = make(max_batch=2)
    engine.submit(request_of(i) for i in range(3))
    assert engine.num_unfinished == 3


def batch_and_order_change_no_rollout(make: MakeEngine) -> None:
    requests = [request_of(i, prompt=[5, 3, 1 + i % 2]) for i in range(5)]
    requests = [Request(prompt_id=f"p{i}", prompt=r.prompt, sampling=r.sampling) for i, r in enumerate(requests)]
    together = run(make(max_batch=3), requests[::-1])
    for request in requests:
        assert_equal(together[request.key], run_alone(make, request))


def progress_counts_tokens_of_running_rollouts(make: MakeEngine) -> None:
    engine = make(max_batch=2)
    before = run_alone(make, request_of(7, max_tokens=5))
    requests = [request_of(7, so_far=before), request_of(0), request_of(1)]
    assert engine.progress() == {}
    engine.submit(requests)
    assert engine.progress() == {}
    engine.step()
    found = engine.progress()
    # Two rollouts run and one waits; aborting returns as many tokens as `progress` reported.
    assert set(found) == {requests[0].key, requests[1].key}
    assert {rollout.key: rollout.num_tokens for rollout in engine.abort(list(found))} == found
    assert found[requests[0].key] >= 5
    assert engine.progress() == {}
    run_on(engine)


def a_rollout_ends_at_max_tokens(make: MakeEngine) -> None:
    rollout = run_alone(make, request_of(0, max_tokens=7))
    assert (rollout.num_tokens, rollout.finish_reason) == (7, "length")
    assert (rollout.loss_mask.all(), rollout.versions.tolist()) == (True, [0] * 7)
    assert (rollout.logprobs <= 0).all()
    assert rollout.tokens.dtype == rollout.versions.dtype == np.int32


def a_stop_token_ends_a_rollout_and_is_its_last_token(make: MakeEngine) -> None:
    whole = run_alone(make, request_of(1))
    stop = int(whole.tokens[9])
    first = whole.tokens.tolist().index(stop)
    rollout = run_alone(make, request_of(1, stop_tokens=(stop, 10**6)))
    assert rollout.tokens.tolist() == whole.tokens[: first + 1].tolist()
    assert rollout.finish_reason == "stop"


def a_stop_token_at_max_tokens_is_a_stop(make: MakeEngine) -> None:
    whole = run_alone(make, request_of(1))
    fresh = next(i for i in range(MAX_TOKENS) if whole.tokens[i] not in whole.tokens[:i] and i > 0)
    rollout = run_alone(make, request_of(1, max_tokens=fresh + 1, stop_tokens=(int(whole.tokens[fresh]),)))
    assert (rollout.num_tokens, rollout.finish_reason) == (fresh + 1, "stop")


def a_continued_rollout_equals_an_uninterrupted_one(make: MakeEngine) -> None:
    for cut in (1, 9, MAX_TOKENS - 1):
        part = run_alone(make, request_of(0, max_tokens=cut))
        whole = run_alone(make, request_of(0, so_far=part))
        assert_equal(whole, run_alone(make, request_of(0)))
        assert whole.num_tokens == MAX_TOKENS


def a_continued_rollout_keeps_its_tokens(make: MakeEngine) -> None:
    part = run_alone(make, request_of(0, max_tokens=4))
    seen = replace(part.observe(np.array([9, 8, 7], np.int32)), reward=1.0)
    engine = make(max_batch=1)
    engine.update_weights(5)
    (rollout,) = engine.generate([request_of(0, max_tokens=9, so_far=seen)])
    assert rollout.tokens[:7].tolist() == seen.tokens.tolist()
    for name in ("logprobs", "policy_logprobs"):
        assert getattr(rollout, name)[:7].tolist() == getattr(seen, name).tolist()
        assert getattr(seen, name)[4:].tolist() == [0, 0, 0]
    assert rollout.loss_mask.tolist() == [True] * 4 + [False] * 3 + [True] * 2
    assert (rollout.versions.tolist(), rollout.reward) == ([0] * 7 + [5] * 2, None)


def peek_returns_what_an_abort_would_and_changes_nothing(make: MakeEngine) -> None:
    wholes = run(make(max_batch=4), [request_of(i) for i in range(3)])
    engine = make(max_batch=2)
    engine.submit([request_of(i) for i in range(3)])
    engine.step()
    assert engine.peek([("p", 2, 2), ("q", 0, 0)]) == []
    seen = engine.peek([("p", 2, 0), ("p", 2, 1)])
    assert {rollout.key: rollout.num_tokens for rollout in seen} == engine.progress()
    for rollout in seen:
        assert_begins(rollout, wholes[rollout.key], "abort")
    for key, rollout in run_on(engine).items():
        assert_equal(rollout, wholes[key])


def a_branch_has_its_parents_tokens_and_goes_on_alone(make: MakeEngine) -> None:
    """Branch from a running and a returned rollout; an engine that has never seen the parent gives the same tokens."""
    engine = make(max_batch=2)
    engine.submit([request_of(0)])
    engine.step()
    (running,) = engine.peek([("p", 2, 0)])
    first = request_of(7, so_far=running.branch(1, sample=7))
    found = run(engine, [first])
    parent = found["p", 2, 0]
    others = [request_of(i, so_far=parent.branch(at, sample=i)) for i, at in ((8, 9), (9, MAX_TOKENS - 1))]
    found |= run(engine, others)
    for request in (first, *others):
        branch, at = found[request.key], request.so_far.num_tokens
        assert (branch.branched_from, branch.num_shared, branch.reward) == (0, at, None)
        assert branch.tokens[:at].tolist() == parent.tokens[:at].tolist()
        assert branch.policy_logprobs[:at].tolist() == parent.policy_logprobs[:at].tolist()
        assert branch.loss_mask.all()
        assert_equal(branch, run_alone(make, request))
    assert found["p", 2, 8].tokens[9:].tolist() != parent.tokens[9:].tolist()


def an_observed_stop_token_does_not_end_a_rollout(make: MakeEngine) -> None:
    seen = run_alone(make, request_of(0, max_tokens=2)).observe(np.array([9], np.int32))
    plain = run_alone(make, request_of(0, max_tokens=6, so_far=seen))
    stop = next(token for token in range(1, 16) if token not in plain.tokens[3:])
    seen_stop = run_alone(make, request_of(0, max_tokens=2)).observe(np.array([stop], np.int32))
    rollout = run_alone(make, request_of(0, max_tokens=4, stop_tokens=(stop,), so_far=seen_stop))
    assert rollout.num_tokens == 4


def duplicate_keys_are_refused(make: MakeEngine) -> None:
    engine = make(max_batch=1)
    engine.submit([request_of(0), request_of(1)])
    engine.step()
    for taken in ([request_of(7), request_of(7)], [request_of(8), request_of(0)], [request_of(8), request_of(1)]):
        with pytest.raises(InputError, match=r"twice|already"):
            engine.submit(taken)
        assert engine.num_unfinished == 2
    assert set(run_on(engine)) == {("p", 2, 0), ("p", 2, 1)}


def a_key_is_in_use_until_its_rollout_is_returned(make: MakeEngine) -> None:
    engine, _ = half_way(make, "finish")
    for sample in range(4):
        with pytest.raises(InputError, match=r"twice|already"):
            engine.submit([request_of(sample)])
    assert len(run_on(engine)) == 4


def a_key_is_free_after_its_rollout_is_returned(make: MakeEngine) -> None:
    engine = make(max_batch=2)
    first = run(engine, [request_of(0)])
    assert_equal(run(engine, [request_of(0)])["p", 2, 0], first["p", 2, 0])
    engine.submit([request_of(1)])
    engine.abort([("p", 2, 1)])
    assert set(run(engine, [request_of(1)])) == {("p", 2, 1)}


def abort_returns_partial_rollouts(make: MakeEngine) -> None:
    wholes = run(make(max_batch=4), [request_of(i) for i in range(4)])
    engine = make(max_batch=2)
    engine.submit([request_of(i) for i in range(4)])
    engine.step()
    aborted = engine.abort([("p", 2, 3), ("p", 2, 0), ("p", 2, 99), ("q", 0, 0)])
    assert sorted(rollout.sample for rollout in aborted) == [0, 3]
    for rollout in aborted:
        assert_begins(rollout, wholes[rollout.key], "abort")
        assert rollout.num_tokens < MAX_TOKENS
    assert next(r for r in aborted if r.sample == 3).num_tokens == 0
    assert engine.num_unfinished == 2
    left = run_on(engine)
    assert set(left) == {("p", 2, 1), ("p", 2, 2)}
    for key, rollout in left.items():
        assert_equal(rollout, wholes[key])


def an_aborted_rollout_continues_on_another_engine(make: MakeEngine) -> None:
    engine = make(max_batch=1)
    engine.submit([request_of(0)])
    for _ in range(2):
        engine.step()
    (part,) = engine.abort([("p", 2, 0)])
    assert 0 < part.num_tokens < MAX_TOKENS
    assert_equal(run_alone(make, request_of(0, so_far=part)), run_alone(make, request_of(0)))


def aborting_a_waiting_continuation_returns_its_tokens(make: MakeEngine) -> None:
    part = run_alone(make, request_of(0, max_tokens=5))
    engine = make(max_batch=1)
    engine.submit([request_of(0, so_far=part)])
    (rollout,) = engine.abort([("p", 2, 0)])
    assert (rollout.tokens.tolist(), rollout.finish_reason) == (part.tokens.tolist(), "abort")
    assert (engine.num_unfinished, engine.abort([("p", 2, 0)])) == (0, [])


def half_way(make: MakeEngine, when_running: WhenRunning) -> tuple[Engine, dict[RolloutKey, Rollout]]:
    """Return an engine that took version 3 while samples 0 and 1 ran and 2 and 3 waited, and undisturbed rollouts.

    Sample 1 is shorter, so its row is free before sample 0 ends.
    """
    requests = [request_of(i, max_tokens=MAX_TOKENS - 3 * (i == 1)) for i in range(4)]
    wholes = run(make(max_batch=4), requests)
    engine = make(max_batch=2)
    engine.submit(requests)
    assert engine.step() == []
    engine.update_weights(3, when_running)
    assert (engine.version, engine.num_unfinished) == (3, 4)
    return engine, wholes


def finish_uses_the_old_weights(make: MakeEngine) -> None:
    engine, wholes = half_way(make, "finish")
    old = {rollout.key: rollout for rollout in engine.step()}
    assert set(old) == {("p", 2, 0), ("p", 2, 1)}
    new = run_on(engine)
    assert set(new) == {("p", 2, 2), ("p", 2, 3)}
    for key, rollout in (old | new).items():
        assert_equal(rollout, wholes[key])
        assert set(rollout.versions.tolist()) == {0 if key in old else 3}


def an_update_aborts_running_rollouts(make: MakeEngine) -> None:
    engine, wholes = half_way(make, "abort")
    old = {rollout.key: rollout for rollout in engine.step()}
    assert set(old) == {("p", 2, 0), ("p", 2, 1)}
    for key, rollout in old.items():
        assert_begins(rollout, wholes[key], "abort")
        assert set(rollout.versions.tolist()) <= {0}
        assert rollout.num_tokens < MAX_TOKENS
    for key, rollout in run_on(engine).items():
        assert_equal(rollout, wholes[key])
        assert set(rollout.versions.tolist()) == {3}


def reprefill_continues_with_the_new_weights(make: MakeEngine) -> None:
    engine, wholes = half_way(make, "reprefill")
    finished = run_on(engine)
    assert set(finished) == set(wholes)
    for key, rollout in finished.items():
        assert_equal(rollout, wholes[key])
        assert rollout.versions.tolist() == sorted(rollout.versions.tolist())
        assert rollout.versions[-1] == 3
    assert all(set(finished["p", 2, i].versions.tolist()) == {0, 3} for i in (0, 1))
    assert all(set(finished["p", 2, i].versions.tolist()) == {3} for i in (2, 3))


def a_rollout_finished_by_an_update_can_still_be_aborted(make: MakeEngine) -> None:
    engine, wholes = half_way(make, "finish")
    (rollout,) = engine.abort([("p", 2, 0)])
    assert_equal(rollout, wholes["p", 2, 0])
    assert set(run_on(engine)) == {("p", 2, 1), ("p", 2, 2), ("p", 2, 3)}


def the_present_version_again_changes_nothing(make: MakeEngine) -> None:
    engine = make(max_batch=1)
    engine.update_weights(3)
    whole = run_alone(make, request_of(0))
    engine.submit([request_of(0)])
    engine.step()
    for when_running in ("finish", "abort", "reprefill"):
        engine.update_weights(3, when_running)
    assert (engine.version, engine.num_unfinished) == (3, 1)
    (rollout,) = run_on(engine).values()
    assert (rollout.tokens.tolist(), set(rollout.versions.tolist())) == (whole.tokens.tolist(), {3})


def versions_only_rise(make: MakeEngine) -> None:
    engine = make(max_batch=1)
    engine.submit([request_of(0)])
    engine.step()
    engine.update_weights(2, "reprefill")
    for version in (1, 0, -1):
        with pytest.raises(InputError, match="below"):
            engine.update_weights(version, "abort")
    assert (engine.version, engine.num_unfinished) == (2, 1)
    assert run_on(engine)["p", 2, 0].num_tokens == MAX_TOKENS


def sampled_tokens_are_counted_once(make: MakeEngine) -> None:
    engine = make(max_batch=2)
    part = run_alone(make, request_of(3, max_tokens=5)).observe(np.array([9], np.int32))
    engine.submit([request_of(0), request_of(1, max_tokens=3)])
    run_on(engine)
    before = engine.stats
    run(engine, [request_of(2), request_of(3, so_far=part)])
    since = engine.stats.since(before)
    assert before.num_sampled == MAX_TOKENS + 3
    assert since.num_sampled == MAX_TOKENS + (MAX_TOKENS - 6)
    assert 0 < since.num_forwards <= since.num_rows <= since.num_sampled
    assert since.num_accepted <= since.num_drafted


LAWS: list[Callable[[MakeEngine], None]] = [
    value
    for value in list(globals().values())
    if getattr(value, "__annotations__", None) == {"make": MakeEngine, "return": None}
]
