"""Misuse and edge cases: requests, foreign history, odd sizes, full arenas, reused buffers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.engine.scripted import ScriptedEngine
from tests.models import VOCAB, build_float64
from treering.engine.protocol import Engine, Request, Rollout, RolloutKey, Sampling
from treering.engine.torch_engine import TorchEngine
from treering.errors import ConfigError, InputError, StateError, UnsupportedError

SAMPLING = Sampling(max_tokens=2)


def request(**changes: Any) -> Request:
    return Request(**{"prompt_id": "q", "prompt": np.array([5, 6], np.int32), "sampling": SAMPLING, **changes})


@pytest.mark.parametrize("prompt", [[5, 6], (5, 6), [np.int64(5), 6], np.array([5, 6], np.uint8)])
def test_any_list_of_token_ids_is_a_prompt(prompt: Any) -> None:
    made = request(prompt=prompt)
    assert (made.prompt.dtype, made.prompt.tolist()) == (np.int32, [5, 6])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": [5.0]}, "an integer array of token ids, got list for 'q'"),
        ({"prompt": ["5"]}, "got list for 'q'"),
        ({"prompt": [True]}, "got list for 'q'"),
        ({"prompt": []}, r"at least one token, got shape \(0,\)"),
        ({"prompt": [-1]}, r"in \[0, 2147483647\], got -1..-1"),
        ({"prompt": [1 << 70]}, "got object for 'q'"),
        ({"prompt": "56"}, "got str for 'q'"),
        ({"prompt_id": 1.5}, "a prompt_id must be text or an integer, got 1.5"),
        ({"prompt_id": True}, "got True"),
    ],
)
def test_invalid_prompts_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        request(**changes)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (request(), "an engine takes a list of requests, got Request.*write .request. for one"),
        (None, "a list of requests, got None"),
        ([("q", [5, 6])], r"treering.Request records, got \('q', \[5, 6\]\); give each its prompt_id"),
        ([request(), None], "Request records, got None"),
    ],
)
def test_invalid_requests_are_refused_and_nothing_is_queued(requests: Any, message: str) -> None:
    engine = ScriptedEngine(lambda request: [7, 8])
    with pytest.raises(InputError, match=message):
        list(engine.generate(requests))
    assert engine.num_unfinished == 0


MAX_STEPS = 2000


def request_of(
    prompt_id: str, num_prompt: int, sample: int = 0, *, so_far: Rollout | None = None, **sampling: object
) -> Request:
    prompt = (np.arange(num_prompt) * 7 + len(prompt_id)).astype(np.int32) % VOCAB
    options = Sampling(**{"max_tokens": 16, **sampling})
    return Request(prompt_id=prompt_id, prompt=prompt, sampling=options, sample=sample, so_far=so_far)


def run(engine: Engine, requests: Sequence[Request]) -> dict[RolloutKey, Rollout]:
    """Run like `generate`, but fail if the engine does not finish."""
    engine.submit(requests)
    finished: list[Rollout] = []
    for _ in range(MAX_STEPS):
        if not engine.num_unfinished:
            return {rollout.key: rollout for rollout in finished}
        finished += engine.step()
    raise AssertionError(f"{engine.num_unfinished} requests wait for ever")


def tokens_of(rollouts: dict[RolloutKey, Rollout]) -> dict[RolloutKey, list[int]]:
    return {key: rollout.tokens.tolist() for key, rollout in rollouts.items()}


def letters(tokens: np.ndarray) -> str:
    return "".join(chr(ord("A") + token) for token in tokens)


def test_a_prefix_in_the_middle_of_the_arena_does_not_block_its_own_rollouts(model: PreTrainedModel) -> None:
    """b's span is allocated after a's; once a's is freed, neither adjacent hole fits b's long rollout."""
    engine = TorchEngine(model, max_tokens=100, max_batch=2)
    requests = [
        request_of("a", 40, 0, max_tokens=10),
        request_of("bb", 21, 0, max_tokens=5),
        request_of("bb", 21, 1, max_tokens=60),
        request_of("a", 40, 1, max_tokens=10),
    ]
    rollouts = run(engine, requests)
    assert [rollouts[request.key].num_tokens for request in requests] == [10, 5, 60, 10]
    engine._table.rollouts.clear()
    assert engine._table.prefixes.allocator.num_free == 100


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_fit_an_empty_arena_finish_as_if_run_separately(model: PreTrainedModel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_slots = int(rng.integers(40, 80))
    requests = []
    for sample in range(40):
        num_prompt = int(rng.integers(1, num_slots // 2))
        max_tokens = int(rng.integers(1, num_slots + 2 - num_prompt))
        requests.append(request_of("x" * int(rng.integers(1, 6)), num_prompt, sample, max_tokens=max_tokens))
    engine = TorchEngine(model, max_tokens=num_slots, max_batch=3, max_prefill=int(rng.integers(1, 9)))
    alone = run(TorchEngine(model, max_tokens=4096), requests)
    assert tokens_of(run(engine, requests)) == tokens_of(alone)
    engine._table.rollouts.clear()
    assert engine._table.prefixes.allocator.num_free == num_slots


def test_siblings_share_a_group_while_they_run_and_groups_are_forgotten(model: PreTrainedModel) -> None:
    engine = TorchEngine(model, max_batch=4)
    engine.submit([request_of(name, 2, sample) for name in ("a", "bb") for sample in range(2)])
    engine.step()
    first = engine._table.columns.groups[:4].tolist()
    assert first[0] == first[1] != first[2] == first[3]
    before = sum(len(value) for value in vars(engine._table).values() if isinstance(value, dict | list))
    run(engine, [request_of("c" * n, 2) for n in range(3, 60)])
    assert sum(len(value) for value in vars(engine._table).values() if isinstance(value, dict | list)) <= before


@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_stop_string_that_spans_an_abort_ends_the_rollout(model: PreTrainedModel, num_steps: int) -> None:
    whole = run(TorchEngine(model), [request_of("q", 3)])["q", 0, 0]
    stop = letters(whole.tokens[2:6])
    request = request_of("q", 3, stop_strings=(stop,))
    expected = run(TorchEngine(model, decode=letters), [request])["q", 0, 0]
    assert expected.tokens.tolist() == whole.tokens[:6].tolist()
    engine = TorchEngine(model, decode=letters)
    engine.submit([request])
    for _ in range(num_steps):
        engine.step()
    (part,) = engine.abort([request.key])
    assert 0 < part.num_tokens < 6
    again = run(engine, [request_of("q", 3, stop_strings=(stop,), so_far=part)])["q", 0, 0]
    assert (again.tokens.tolist(), again.finish_reason) == (expected.tokens.tolist(), "stop")


def test_a_stop_string_that_ended_a_turn_does_not_end_the_next(model: PreTrainedModel) -> None:
    whole = run(TorchEngine(model), [request_of("q", 3)])["q", 0, 0]
    stop = letters(whole.tokens[2:4])
    engine = TorchEngine(model, decode=letters)
    first = run(engine, [request_of("q", 3, stop_strings=(stop,))])["q", 0, 0]
    assert first.finish_reason == "stop"
    for observed in ([], [1, 2]):
        longer = first.observe(np.array(observed, np.int32))
        second = run(engine, [request_of("q", 3, stop_strings=(stop,), so_far=longer)])["q", 0, 0]
        assert second.num_tokens > longer.num_tokens + 1


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_turn_that_was_aborted_is_not_ended_by_the_string_of_the_turn_before(
    model: PreTrainedModel, num_steps: int
) -> None:
    whole = run(TorchEngine(model), [request_of("q", 3)])["q", 0, 0]
    stop = letters(whole.tokens[2:4])
    engine = TorchEngine(model, decode=letters)
    first = run(engine, [request_of("q", 3, stop_strings=(stop,))])["q", 0, 0]
    following = request_of("q", 3, stop_strings=(stop,), so_far=first)
    expected = run(engine, [following])["q", 0, 0]
    assert expected.num_tokens > first.num_tokens + 3
    engine.submit([following])
    for _ in range(num_steps):
        engine.step()
    (part,) = engine.abort([following.key])
    again = run(engine, [request_of("q", 3, stop_strings=(stop,), so_far=part)])["q", 0, 0]
    assert (again.tokens.tolist(), again.finish_reason) == (expected.tokens.tolist(), expected.finish_reason)


@pytest.mark.parametrize("max_tokens", [2, 5])
@pytest.mark.parametrize("backend", ["fused", "plain"])
def test_the_smallest_arenas_hold_what_fits_them(model: PreTrainedModel, max_tokens: int, backend: str) -> None:
    request = request_of("q", 2, max_tokens=max_tokens - 1)
    engine = TorchEngine(model, max_tokens=max_tokens, backend=backend)
    assert tokens_of(run(engine, [request])) == tokens_of(run(TorchEngine(model), [request]))


def test_tokens_without_an_embedding_are_refused(model: PreTrainedModel) -> None:
    engine = TorchEngine(model)
    part = run(engine, [request_of("q", 3, max_tokens=2)])["q", 0, 0]
    for token in (VOCAB, -1):
        longer = part.observe(np.array([token]))
        with pytest.raises(InputError, match=f"so_far.*{token}.*tokenizer"):
            engine.submit([request_of("q", 3, so_far=longer)])
    for observed in ([1.7], [[1]], [True]):
        with pytest.raises(InputError, match="one-dimensional array of token ids"):
            part.observe(np.array(observed))
    wide = build_float64()
    wide.lm_head = torch.nn.Linear(32, VOCAB + 8, bias=False, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match=f"{VOCAB + 8} rows.*{VOCAB}"):
        TorchEngine(wide)


def test_hidden_tokens_are_never_sampled_and_diverged_weights_are_reported() -> None:
    model = build_float64()
    model.lm_head = torch.nn.Linear(32, VOCAB, dtype=torch.float64)
    with torch.no_grad():
        model.lm_head.bias[5:] = float("-inf")
    rollouts = run(TorchEngine(model), [request_of("q", 3, sample) for sample in range(4)])
    assert max(rollout.tokens.max() for rollout in rollouts.values()) == 4
    with torch.no_grad():
        model.lm_head.bias[0] = float("nan")
    with pytest.raises(StateError, match=r"NaN.*checkpoint"):
        TorchEngine(model)


def test_an_engine_made_in_inference_mode_takes_new_weights(model: PreTrainedModel) -> None:
    for backend in ("fused", "plain"):
        with torch.inference_mode():
            engine = TorchEngine(model, backend=backend)
        engine.update_weights(1)
        assert tokens_of(run(engine, [request_of("q", 3)])) == tokens_of(run(TorchEngine(model), [request_of("q", 3)]))


def test_settings_of_the_wrong_type_are_refused_by_name(model: PreTrainedModel) -> None:
    for name, value in (("max_batch", 2.5), ("max_tokens", 1), ("seed", 1.5), ("version", -1), ("num_threads", 0)):
        with pytest.raises(ConfigError, match=f"{name}.*{value}"):
            TorchEngine(model, **{name: value})
    for name, value in (
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("temperature", "1"),
        ("top_k", 1.5),
        ("top_p", None),
        ("stop_tokens", 3),
        ("stop_tokens", (-1,)),
        ("stop_tokens", (2**40,)),
        ("stop_strings", "END"),
    ):
        with pytest.raises(ConfigError, match=name):
            request_of("q", 3, **{name: value})
    assert request_of("q", 3, stop_tokens=[2]).sampling == request_of("q", 3, stop_tokens=(2,)).sampling
