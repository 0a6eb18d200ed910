"""The host answers calls from any thread with the engine's rollouts, and drops the requests of callers that leave."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait

import numpy as np
import pytest

from tests.engine.scripted import ScriptedEngine
from treering.engine.host import EngineHost
from treering.engine.protocol import Request, Rollout, RolloutKey, Sampling
from treering.engine.sampling.noise import call_id, row_key
from treering.errors import InputError, StateError


class CountedEngine(ScriptedEngine):
    """Engine that samples 1, 2, 3 and so on up to its first prompt token, counts its steps and may wait before one."""

    def __init__(self, **options: int) -> None:
        super().__init__(lambda request: range(1, 1 + int(request.prompt[0])), **options)
        self.num_steps = 0
        self.may_step = threading.Event()
        self.may_step.set()

    def step(self) -> list[Rollout]:
        self.may_step.wait()
        self.num_steps += 1
        return super().step()


def request_of(length: int, call: int | None = None, **fields: object) -> Request:
    return Request(prompt_id="q", prompt=[length], sampling=Sampling(max_tokens=100), call=call, **fields)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def lengths(rollouts: Sequence[Rollout]) -> list[int]:
    return [rollout.num_tokens for rollout in rollouts]


def test_calls_from_many_threads_and_coroutines_get_their_own_rollouts() -> None:
    with EngineHost(CountedEngine(max_batch=3)) as host:

        async def ask(first: int) -> list[Rollout]:
            return await asyncio.gather(*(host.sample(request_of(i, call=i)) for i in range(first, first + 8)))

        found: dict[int, list[Rollout]] = {}
        threads = [
            threading.Thread(target=lambda first=first: found.update({first: asyncio.run(ask(first))}))
            for first in (1, 9, 17)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {first: lengths(rollouts) for first, rollouts in found.items()} == {
        first: list(range(first, first + 8)) for first in (1, 9, 17)
    }


def test_the_thread_waits_without_steps_while_no_call_is_open() -> None:
    engine = CountedEngine()
    with EngineHost(engine) as host:
        for num_steps in (4, 8):
            host.submit(request_of(4)).result()
            wait_for(lambda: host.is_waiting)
            assert engine.num_steps == num_steps


def test_a_caller_that_leaves_gives_its_row_back() -> None:
    engine = CountedEngine(max_batch=1)
    engine.may_step.clear()
    with EngineHost(engine) as host:

        async def leave() -> None:
            task = asyncio.ensure_future(host.sample(request_of(90, call=1)))
            await asyncio.sleep(0)
            wait_for(lambda: engine.num_unfinished == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(leave())
        waiting = host.submit(request_of(90, call=2))
        other = host.submit(request_of(3, call=3))
        assert waiting.cancel()
        assert wait([waiting], timeout=30).done == {waiting}
        engine.may_step.set()
        assert other.result().num_tokens == 3
        wait_for(lambda: host.is_waiting)
    assert engine.num_unfinished == 0
    # The abandoned calls had 90 tokens each.
    assert engine.num_steps < 90


def test_a_caller_that_leaves_takes_no_other_call_of_its_key_along() -> None:
    engine = CountedEngine()
    engine.may_step.clear()
    with EngineHost(engine) as host:
        first = host.submit(request_of(5))
        wait_for(lambda: engine.num_unfinished == 1)
        assert host.submit(request_of(5)).cancel()
        engine.may_step.set()
        assert first.result(timeout=30).num_tokens == 5


def test_a_refused_request_is_its_own_callers_error() -> None:
    with EngineHost(CountedEngine()) as host:
        good = host.submit(request_of(5, call=1))
        bad = Request(prompt_id="q", prompt=[1], sampling=Sampling(max_tokens=1, stop_strings=("x",)))
        with pytest.raises(InputError, match="stop strings need"):
            host.submit(bad).result()
        assert good.result().num_tokens == 5


def test_an_engines_error_reaches_every_caller_also_later() -> None:
    class Broken(CountedEngine):
        def step(self) -> list[Rollout]:
            super().step()
            raise StateError("logits are NaN")

    engine = Broken()
    engine.may_step.clear()
    with EngineHost(engine) as host:
        calls = [host.submit(request_of(5, call=i)) for i in range(3)]
        engine.may_step.set()
        for call in [*calls, host.submit(request_of(5, call=9))]:
            with pytest.raises(StateError, match="logits are NaN"):
                call.result()
    assert engine.num_unfinished == 0


@pytest.mark.parametrize("fails_in_steps", [True, False])
def test_callers_of_an_engine_whose_abort_fails_too_do_not_hang(fails_in_steps: bool) -> None:
    class Dead(CountedEngine):
        def step(self) -> list[Rollout]:
            finished = super().step()
            if fails_in_steps:
                raise StateError("the engine is dead")
            return finished

        def abort(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
            raise StateError("the engine is dead")

    engine = Dead(max_batch=1)
    engine.may_step.clear()
    with EngineHost(engine) as host:
        leaving, call = (host.submit(request_of(50, call=i)) for i in range(2))
        wait_for(lambda: engine.num_unfinished > 0)
        leaving.cancel()
        engine.may_step.set()
        for each in (call, host.submit(request_of(5, call=9))):
            with pytest.raises(StateError, match="the engine is dead"):
                each.result(timeout=30)


def test_closing_fails_open_calls_frees_the_engine_and_refuses_later_ones() -> None:
    engine = CountedEngine()
    engine.may_step.clear()
    host = EngineHost(engine)
    call = host.submit(request_of(50))
    closing = threading.Thread(target=host.close)
    closing.start()
    wait_for(lambda: host._is_closed)
    engine.may_step.set()
    closing.join()
    with pytest.raises(StateError, match="closed before"):
        call.result()
    with pytest.raises(StateError, match="is closed"):
        host.submit(request_of(1))
    assert engine.num_unfinished == 0
    host.close()


def test_a_busy_engine_is_refused() -> None:
    engine = CountedEngine()
    engine.submit([request_of(1)])
    with pytest.raises(StateError, match="idle engine, got one with 1 request;"):
        EngineHost(engine)


def test_functions_run_in_the_thread_between_steps() -> None:
    engine, names = CountedEngine(), []
    with EngineHost(engine) as host:
        host.run(lambda: names.append(threading.current_thread().name))
        host.submit(request_of(1)).result()
    assert names == ["treering-engine"]


def test_queued_calls_run_by_rank_and_leaving_calls_are_dropped() -> None:
    engine, ended = CountedEngine(max_batch=4), []
    engine.may_step.clear()
    with EngineHost(engine, max_rows=1) as host:
        first = host.submit(request_of(3, call=0))
        # The engine has this request now and waits before its step.
        wait_for(lambda: engine.num_unfinished == 1)
        answers = {rank: host.submit(request_of(2, call=rank), rank=rank) for rank in (3, 1, 4, 2)}
        for rank, answer in answers.items():
            answer.add_done_callback(lambda _, rank=rank: ended.append(rank))
        answers[4].cancel()
        again = host.submit(request_of(2, call=3), rank=9)
        engine.may_step.set()
        assert first.result().num_tokens == 3
        assert [answers[rank].result().num_tokens for rank in (1, 2, 3)] == [2, 2, 2]
        with pytest.raises(InputError, match="key must be unique"):
            again.result()
    assert ended == [4, 1, 2, 3]
    assert engine.num_unfinished == 0


def test_the_noise_of_a_call_is_of_its_context_its_agent_and_how_often_it_was_asked() -> None:
    context = np.array([5, 6], np.int32)
    ids = [
        call_id(context),
        call_id(context, 1),
        call_id(context, 0, "critic"),
        call_id(np.array([5, 6, 0], np.int32)),
        call_id(np.array([6, 5], np.int32)),
    ]
    keys = {row_key(0, "q", 0, 0, call) for call in [*ids, None]}
    assert len(keys) == 6
    assert call_id(context.astype(np.int64)) == ids[0]
