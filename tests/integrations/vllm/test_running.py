"""A rollout is assembled from vLLM's steps. Does not need vLLM."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from treering.engine.protocol import Request, Rollout, Sampling
from treering.errors import StateError
from treering.integrations.vllm.llm_requests import RunningRollout

PROMPT = np.array([3, 1, 4], np.int32)


def letters(tokens: Any) -> str:
    return "".join(chr(97 + int(token)) for token in tokens)


def request_of(stop: str = "", so_far: Rollout | None = None) -> Request:
    sampling = Sampling(max_tokens=50, stop_strings=(stop,) if stop else ())
    return Request(prompt_id="p", prompt=PROMPT, sampling=sampling, so_far=so_far)


def running(request: Request, start: Rollout | None = None, version: int = 0) -> RunningRollout:
    return RunningRollout(
        request=request,
        vllm_id="0",
        version=version,
        start=request.unstarted() if start is None else start,
        has_policy_logprobs=True,
    )


def step(*tokens: int, finish: str | None = None, versions: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        token_ids=list(tokens),
        logprobs=[{token: SimpleNamespace(logprob=-token / 10)} for token in tokens],
        finish_reason=finish,
        weight_versions=[SimpleNamespace(version=version) for version in versions],
    )


def test_tokens_of_each_step_are_put_together_under_one_version() -> None:
    first = running(request_of(), version=2)
    assert [first.extend(step(5, 6)), first.extend(step(7))] == [2, 1]
    second = running(request_of(), first.rollout("abort"), version=3)
    second.extend(step(8, finish="length", versions=("3",)))
    rollout = second.rollout("length")
    assert rollout.tokens.tolist() == [5, 6, 7, 8]
    assert rollout.logprobs.tolist() == rollout.policy_logprobs.tolist() == [-0.5, -0.6, -0.7, -0.8]
    assert (rollout.versions.tolist(), rollout.finish_reason) == ([2, 2, 2, 3], "length")


@pytest.mark.parametrize(("finish", "versions"), [("abort", ()), ("error", ()), ("stop", ("2", "3")), ("stop", ("1",))])
def test_an_end_of_vllm_s_own_and_other_weights_are_errors(finish: str, versions: tuple[str, ...]) -> None:
    with pytest.raises(StateError, match=r"\('p', 0, 0\)"):
        running(request_of(), version=2).extend(step(5, finish=finish, versions=versions))


@pytest.mark.parametrize("num_before", range(5))
def test_a_stop_string_is_found_wherever_the_rollout_was_interrupted(num_before: int) -> None:
    whole = [9, 1, 2, 3, 4, 4, 4]
    request = request_of("bcde")
    before = running(request)
    before.extend(step(*whole[:num_before]))
    after = running(request, before.rollout("abort"))
    num_new = after.extend(step(*whole[num_before:]))
    assert after.cut_at_stop(num_new, letters)
    assert after.rollout("stop").tokens.tolist() == whole[:5]
    assert len(after.tokens) == len(after.logprobs)


def test_a_stop_string_never_spans_an_observation() -> None:
    part = running(request_of())
    part.extend(step(1, 2))
    seen = part.rollout("stop").observe(np.array([3], np.int32))
    after = running(request_of("cde", so_far=seen), seen)
    assert not after.cut_at_stop(after.extend(step(4, 0)), letters)
    assert running(request_of("cde", so_far=seen), seen).cut_at_stop(0, letters) is False


@pytest.mark.parametrize("num_before", range(7))
def test_an_aborted_turn_ends_where_it_would_have_ended(num_before: int) -> None:
    def quarters(tokens: Any) -> str:
        return "b" * (len(tokens) // 4)

    def num_until_stop(rollout: RunningRollout) -> int:
        while not rollout.cut_at_stop(rollout.extend(step(1)), quarters):
            pass
        return len(rollout.tokens)

    turn = running(request_of("bb"))
    num_tokens = num_until_stop(turn)
    assert num_tokens == 7
    first = turn.rollout("stop")
    part = running(request_of("bb", so_far=first), first)
    for _ in range(num_before):
        assert not part.cut_at_stop(part.extend(step(1)), quarters)
    aborted = part.rollout("abort")
    assert num_until_stop(running(request_of("bb", so_far=aborted), aborted)) == num_tokens - num_before
