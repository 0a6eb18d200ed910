"""Rehearsed rollouts keep law 5 and the new weights' log-probs, and use only rows that nothing else needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.engine.test_torch_engine import Rollouts, assert_same, drafter_of, group_requests, run
from tests.models import VOCAB, build_float64
from treering.engine.protocol import Request, Rollout, RolloutKey
from treering.engine.torch_engine import TorchEngine
from treering.errors import InputError
from treering.types import TokenIds

Tokens = Mapping[RolloutKey, TokenIds]
SOME = group_requests(6, 3, stop_tokens=(7,))


@pytest.fixture
def policy() -> PreTrainedModel:
    """Return a model whose weights a test may change."""
    return build_float64("qwen3").eval()


def move(model: PreTrainedModel, size: float, seed: int = 0) -> None:
    """Change the weights a little, as an update does."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += size * weight.std() * torch.randn(weight.shape, generator=noise, dtype=weight.dtype)


def rehearse(engine: TorchEngine, requests: Sequence[Request], num_steps: int | None = None) -> Tokens:
    """Return the tokens that an engine rehearses for requests, to the end or for some steps."""
    engine.rehearse(requests)
    while engine.is_rehearsing and num_steps != 0:
        assert engine.step() == []
        num_steps = None if num_steps is None else num_steps - 1
    return engine.take_rehearsals()


def with_tokens(requests: Sequence[Request], tokens: Tokens) -> list[Request]:
    return [replace(request, rehearsed=tokens.get(request.key)) for request in requests]


def tokens_of(rollouts: Rollouts) -> dict[RolloutKey, TokenIds]:
    return {key: rollout.tokens for key, rollout in rollouts.items()}


def updated(model: PreTrainedModel, size: float = 0.05, **options: object) -> tuple[TorchEngine, Rollouts]:
    """Return an engine that rehearsed SOME and got changed weights, and the rollouts that these sample."""
    engine = TorchEngine(model, **options)
    engine.rehearse(SOME)
    for _ in range(12):
        engine.step()
    move(model, size)
    engine.update_weights(1)
    return engine, run(TorchEngine(model, max_batch=1, version=1), SOME)


def test_the_same_weights_keep_every_rehearsed_token(model: PreTrainedModel) -> None:
    requests = group_requests(stop_tokens=(7,))
    plain = run(TorchEngine(model, max_batch=64), requests)
    engine = TorchEngine(model, max_batch=64)
    rehearsed = rehearse(engine, requests)
    assert {key: tokens.tolist() for key, tokens in rehearsed.items()} == {
        key: rollout.tokens.tolist() for key, rollout in plain.items()
    }
    before = engine.stats
    assert (before.num_rows, before.num_sampled, before.num_rehearsed) == (0, 0, sum(map(len, rehearsed.values())))
    found = run(engine, with_tokens(requests, rehearsed))
    assert_same(found, plain)
    stats = engine.stats.since(before)
    # Each row and pass draws one more token than it verifies, such as the last one of a rollout.
    assert stats.num_kept == stats.num_verified == stats.num_sampled - stats.num_rows
    assert (stats.num_changed, stats.num_drafted, stats.num_rehearsed) == (0, 0, 0)
    assert stats.num_forwards <= 5 < max(map(len, rehearsed.values()))


@pytest.mark.parametrize(
    ("backend", "max_prefill", "drafting"),
    [("fused", 512, False), ("plain", 512, True), ("fused", 5, True), ("fused", 1, False)],
)
def test_after_an_update_tokens_and_logprobs_are_those_of_the_new_weights(
    policy: PreTrainedModel, backend: str, max_prefill: int, drafting: bool
) -> None:
    engine, expected = updated(policy, max_batch=64, max_prefill=max_prefill, backend=backend, costs="none")
    rehearsed = engine.take_rehearsals()
    if drafting:
        engine.use_drafter(drafter_of(expected))
    before = engine.stats
    found = run(engine, with_tokens(SOME, rehearsed))
    assert_same(found, expected)
    assert all((rollout.versions == 1).all() for rollout in found.values())
    stats = engine.stats.since(before)
    if max_prefill < 512:
        # Rows sample normally until their turn to be verified.
        return
    assert 0 < stats.num_kept < stats.num_verified
    num_equal = [common(tokens, expected[key].tokens) for key, tokens in rehearsed.items()]
    num_other = sum(count < tokens.size for count, tokens in zip(num_equal, rehearsed.values(), strict=True))
    assert stats.num_changed == num_other > 0
    assert (stats.num_accepted > 0) == drafting


WRONG: dict[str, Callable[[Rollout], object]] = {
    "cut": lambda rollout: rollout.tokens[:3],
    "empty": lambda rollout: [],
    "another token": lambda rollout: np.where(np.arange(rollout.num_tokens) == 4, 3, rollout.tokens),
    "one position off": lambda rollout: rollout.tokens[1:],
    "random": lambda rollout: np.random.default_rng(0).integers(0, VOCAB, 40),
    "beyond the vocabulary": lambda rollout: [*rollout.tokens[:2].tolist(), 10**12, -5, 3],
    "a stop in it": lambda rollout: [*rollout.tokens[:2].tolist(), 7, 3, 3],
    "beyond the end": lambda rollout: [*rollout.tokens.tolist(), *[3] * 30],
    "of another rollout": lambda rollout: np.arange(20, dtype=np.int64),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda name: name.replace(" ", "_"))
@pytest.mark.parametrize("max_batch", [1, 16])
def test_no_rehearsal_changes_a_token(model: PreTrainedModel, wrong: str, max_batch: int) -> None:
    requests = group_requests(4, stop_tokens=(7,))
    plain = run(TorchEngine(model, max_batch=1), requests)
    # Rehearse every second sample, so that some have siblings without a rehearsal.
    tokens = {key: WRONG[wrong](rollout) for key, rollout in plain.items() if key[2] % 2}
    engine = TorchEngine(model, drafter_of(plain), max_batch=max_batch, costs="none")
    assert_same(run(engine, with_tokens(requests, tokens)), plain)


def test_rehearsals_of_other_prompts_draws_and_seeds_change_no_token(model: PreTrainedModel) -> None:
    requests = group_requests(6, stop_tokens=(7,))
    plain = run(TorchEngine(model), requests)
    others = run(TorchEngine(model, seed=5), [replace(each, draw=3) for each in requests])
    left = [other.tokens for other in others.values()]
    tokens = {request.key: left[-number] for number, request in enumerate(requests)}
    engine = TorchEngine(model)
    assert_same(run(engine, with_tokens(requests, tokens)), plain)
    assert engine.stats.num_kept < engine.stats.num_verified / 2


@pytest.mark.parametrize("options", [{"top_p": 0.6}, {"top_k": 5}, {"repetition_penalty": 1.7, "min_p": 0.1}], ids=str)
def test_cuts_and_penalties_are_those_of_each_prefix(policy: PreTrainedModel, options: dict[str, float]) -> None:
    requests = group_requests(6, temperature=0.8, **options)
    rehearsed = rehearse(TorchEngine(policy), requests)
    move(policy, 0.05)
    expected = run(TorchEngine(policy, max_batch=1), requests)
    engine = TorchEngine(policy)
    assert_same(run(engine, with_tokens(requests, rehearsed)), expected)
    assert 0 < engine.stats.num_kept < engine.stats.num_verified


def test_stop_strings_end_a_kept_prefix_where_they_end_a_rollout(model: PreTrainedModel) -> None:
    def decode(tokens: TokenIds) -> str:
        return "".join(chr(97 + token % 26) for token in tokens.tolist())

    requests = group_requests(8, stop_strings=("a", "bc", "kz"))
    free = run(TorchEngine(model), group_requests(8))
    plain = run(TorchEngine(model, decode=decode, max_batch=1), requests)
    assert {rollout.finish_reason for rollout in plain.values()} == {"stop", "length"}
    for tokens in (tokens_of(plain), tokens_of(free)):
        engine = TorchEngine(model, decode=decode)
        assert_same(run(engine, with_tokens(requests, tokens)), plain)
        assert engine.stats.num_kept > 0


@pytest.mark.parametrize("cut", [1, 6, 19])
def test_a_resumed_rollout_continues_with_its_rehearsal(model: PreTrainedModel, cut: int) -> None:
    requests = group_requests(6)
    plain = run(TorchEngine(model), requests)
    parts = run(TorchEngine(model), group_requests(6, max_tokens=cut))
    resumed = [replace(request, so_far=parts[request.key]) for request in requests]
    engine = TorchEngine(model)
    assert_same(run(engine, with_tokens(resumed, tokens_of(plain))), plain)
    assert 0 <= engine.stats.num_kept == engine.stats.num_verified == engine.stats.num_sampled - engine.stats.num_rows
    assert engine.stats.num_rows <= 2 * len(requests)
    # A rehearsal with another beginning is not verified.
    other = {key: np.roll(rollout.tokens, 1) + 1 for key, rollout in plain.items()}
    engine = TorchEngine(model)
    assert_same(run(engine, with_tokens(resumed, other)), plain)
    assert engine.stats.num_verified == 0


def test_an_aborted_rollout_continues_elsewhere(model: PreTrainedModel) -> None:
    requests = group_requests(6)
    plain = run(TorchEngine(model), requests)
    engine = TorchEngine(model, max_batch=24, max_prefill=60)
    half = {key: rollout.tokens[:9] for key, rollout in plain.items()}
    engine.submit(with_tokens(requests, half))
    for _ in range(3):
        engine.step()
    parts = {rollout.key: rollout for rollout in engine.abort([request.key for request in requests])}
    engine.submit([])
    rest = [replace(request, so_far=parts[request.key]) for request in requests]
    assert_same(run(TorchEngine(model), with_tokens(rest, tokens_of(plain))), plain)


def test_rehearsals_take_only_rows_that_nothing_else_needs(model: PreTrainedModel) -> None:
    now, later = group_requests(5, 2), group_requests(16, 4, draw=1)
    plain = TorchEngine(model, max_batch=4)
    expected = run(plain, now)
    engine = TorchEngine(model, max_batch=4)
    engine.rehearse(later)
    assert_same(run(engine, now), expected)
    names = ("num_forwards", "num_rows", "num_sampled", "num_drafted")
    assert [getattr(engine.stats, name) for name in names] == [getattr(plain.stats, name) for name in names]
    assert engine.stats.num_rehearsed > 0
    assert engine.progress() == {}
    # Rows that rehearse are given up when a request arrives.
    for _ in range(3):
        engine.step()
    before = engine.stats
    again = [replace(request, draw=2) for request in now]
    assert run(engine, again).keys() == {request.key for request in again}
    full = engine.stats.since(before)
    plain_again = plain.stats
    run(plain, again)
    assert full.num_forwards == plain.stats.since(plain_again).num_forwards
    assert engine.abort([request.key for request in later]) == []
    whole = run(TorchEngine(model), later)
    tokens = engine.take_rehearsals()
    assert tokens
    assert not engine.is_rehearsing
    for key, found in tokens.items():
        assert found.tolist() == whole[key].tokens[: found.size].tolist()


def test_rehearsals_take_only_free_memory(model: PreTrainedModel) -> None:
    (now, *_), later = group_requests(3, 1, max_tokens=30)[2:], group_requests(4, 2, draw=1, max_tokens=30)
    engine = TorchEngine(model, max_batch=8, max_tokens=70)
    expected = run(TorchEngine(model), [now])
    engine.rehearse(later)
    engine.step()
    engine.step()
    found = run(engine, [now])
    assert_same(found, expected)
    assert engine.stats.num_forwards <= 2 + 30 + 1


def test_an_update_ends_rehearsals_and_forgets_their_keys(policy: PreTrainedModel) -> None:
    engine, expected = updated(policy, max_batch=64)
    engine.keep_rollouts()
    assert not engine.is_rehearsing
    rehearsed = engine.take_rehearsals()
    assert max(tokens.size for tokens in rehearsed.values()) == 12
    assert engine.take_rehearsals() == {}
    assert_same(run(engine, with_tokens(SOME, rehearsed)), expected)


def test_a_submitted_request_ends_its_own_rehearsal(model: PreTrainedModel) -> None:
    requests = group_requests(4, 2)
    engine = TorchEngine(model, max_batch=4)
    engine.rehearse(requests)
    engine.step()
    with pytest.raises(InputError, match="already"):
        engine.rehearse(requests[:1])
    assert_same(run(engine, requests), run(TorchEngine(model), requests))
    with pytest.raises(InputError, match="rehearsed tokens"):
        replace(requests[0], rehearsed=[0.5])


def common(left: TokenIds, right: TokenIds) -> int:
    size = min(left.size, right.size)
    return next((at for at in range(size) if left[at] != right[at]), size)
