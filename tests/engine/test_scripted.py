"""The scripted engine obeys the protocol's laws and returns exactly its script."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest

from tests.engine.protocol_laws import LAWS, MakeEngine, request_of
from tests.engine.scripted import ScriptedEngine
from treering.engine.protocol import Engine, EngineStats, Request, Sampling
from treering.errors import ConfigError, InputError


def keyed_token(request: Request, position: int) -> int:
    digest = hashlib.sha256(repr((request.key, request.prompt.tolist(), position)).encode()).digest()
    return 1 + digest[0] % 15


def endless(request: Request) -> list[int]:
    first = 0 if request.so_far is None else request.so_far.num_tokens
    return [keyed_token(request, position) for position in range(first, 100)]


def make_scripted(max_batch: int) -> Engine:
    return ScriptedEngine(endless, max_batch=max_batch)


@pytest.mark.parametrize("assert_law", LAWS, ids=lambda law: law.__name__)
def test_the_scripted_engine_keeps_the_law(assert_law: Callable[[MakeEngine], None]) -> None:
    assert_law(make_scripted)


def test_a_step_gives_every_running_rollout_one_token() -> None:
    engine = ScriptedEngine(lambda request: [7, 8, 9][: 1 + request.sample], max_batch=2)
    engine.submit([request_of(i) for i in range(3)])
    finished = [[rollout.sample for rollout in engine.step()] for _ in range(5)]
    assert finished == [[0], [1], [], [2], []]
    prefilled = 3 * request_of(0).prompt.size
    assert engine.stats == EngineStats(num_forwards=4, num_rows=6, num_sampled=6, num_prefilled=prefilled)
    assert engine.stats.tokens_per_forward == 1.0


def test_a_script_is_called_once_when_its_request_starts() -> None:
    asked: list[int] = []

    def script(request: Request) -> list[int]:
        asked.append(request.sample)
        return [1, 2]

    engine = ScriptedEngine(script, max_batch=1)
    engine.submit([request_of(0), request_of(1)])
    engine.step()
    assert asked == [0]
    engine.update_weights(1, "reprefill")
    assert len(list(engine.generate([]))) == 2
    assert asked == [0, 1]


def test_unsupported_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match="got max_batch=0"):
        ScriptedEngine(endless, max_batch=0)
    engine = ScriptedEngine(endless, version=4)
    assert engine.version == 4
    with pytest.raises(ConfigError, match=r"when_running must be one of.*'later'"):
        engine.update_weights(5, "later")  # type: ignore[arg-type]
    assert engine.version == 4
    sampling = Sampling(max_tokens=3, stop_strings=("end",))
    with pytest.raises(InputError, match=r"need a tokenizer.*\('end',\)"):
        engine.submit([request_of(0), Request(prompt_id=1, prompt=np.array([1], np.int32), sampling=sampling)])
    assert engine.num_unfinished == 0
