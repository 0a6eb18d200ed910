"""Hidden tokens and likeliest tokens are those that stock transformers processors give, whatever is drafted."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.engine.test_torch_engine import assert_same, drafter_of, group_requests, run
from tests.models import VOCAB
from treering.engine.protocol import Request, Rollout, Sampling
from treering.engine.torch_engine import TorchEngine
from treering.errors import ConfigError, InputError

STOPS = (*range(0, VOCAB, 3), 10**6)
NUM_TOP = 5
CASES = [
    {},
    {"temperature": 0.6, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 4},
    {"top_k": 1},
    {"temperature": 0.8, "repetition_penalty": 1.7},
]


def stock_logprobs(model: PreTrainedModel, request: Request, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs of all tokens at each position: after temperature only, and of the sampled distribution."""
    sampling, num_prompt = request.sampling, request.prompt.size
    whole = torch.from_numpy(np.concatenate([request.prompt, rollout.tokens]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=whole).logits[0, num_prompt - 1 : -1]
    stops = [stop for stop in STOPS if stop < VOCAB]
    steps = [
        MinNewTokensLengthLogitsProcessor(num_prompt, sampling.min_tokens, stops),
        RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        TemperatureLogitsWarper(sampling.temperature),
        *([TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []),
        TopPLogitsWarper(sampling.top_p),
    ]
    process = LogitsProcessorList(steps)
    sampled = [process(whole[:, : num_prompt + i], logits[i : i + 1].clone()) for i in range(rollout.num_tokens)]
    return (logits / sampling.temperature).log_softmax(-1), torch.cat(sampled).log_softmax(-1)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_no_stop_comes_early_and_log_probs_are_those_of_stock_processors(
    model: PreTrainedModel, options: dict[str, float]
) -> None:
    requests = group_requests(5, 4, max_tokens=10, stop_tokens=STOPS, min_tokens=6, num_top_logprobs=NUM_TOP, **options)
    expected = run(TorchEngine(model, max_batch=1, backend="plain"), requests)
    engine = TorchEngine(model, drafter_of(expected, min_acceptance=0.001), max_batch=20, costs="none")
    drafted = run(engine, requests)
    assert_same(drafted, expected)
    assert engine.stats.num_accepted > 0
    assert engine.stats.num_duplicate_rows > 0
    for request in requests:
        rollout = drafted[request.key]
        assert not np.isin(rollout.tokens[:6], STOPS).any()
        assert rollout.num_tokens > 6
        policy, sampled = stock_logprobs(model, request, rollout)
        at = torch.arange(rollout.num_tokens), torch.from_numpy(rollout.tokens).long()
        np.testing.assert_allclose(rollout.policy_logprobs, policy[at], atol=1e-9)
        np.testing.assert_allclose(rollout.logprobs, sampled[at], atol=1e-9)
        top = (policy if options.get("top_k") == 1 else sampled).topk(NUM_TOP)
        np.testing.assert_allclose(rollout.top.logprobs, top.values, atol=1e-9)
        can_be_sampled = rollout.top.logprobs > -np.inf
        assert (rollout.top.tokens == top.indices.numpy())[can_be_sampled].all()
        assert rollout.top.logprobs.shape == expected[request.key].top.logprobs.shape
    assert any(rollout.finish_reason == "stop" for rollout in drafted.values())


def test_rows_that_share_logits_hide_only_their_own_stops(model: PreTrainedModel) -> None:
    requests = [
        request if request.sample % 2 else Request(
            prompt_id=request.prompt_id, prompt=request.prompt, sample=request.sample, sampling=Sampling(
                max_tokens=8, stop_tokens=STOPS, min_tokens=request.sample, num_top_logprobs=request.sample)
        )
        for request in group_requests(4, 6, max_tokens=8, stop_tokens=(1, 2))
    ]  # fmt: skip
    engine = TorchEngine(model, max_batch=24, costs="none")
    together = run(engine, requests)
    assert engine.stats.num_duplicate_rows > 0
    for request in requests:
        (alone,) = TorchEngine(model, max_batch=1, costs="none").generate([request])
        assert_same({request.key: together[request.key]}, {request.key: alone})
        assert (alone.top is None) == (request.sampling.num_top_logprobs == 0)
        if alone.top is not None:
            np.testing.assert_allclose(together[request.key].top.logprobs, alone.top.logprobs, atol=1e-10)


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) if token < 26 else "-" for token in tokens)


def test_a_stop_string_before_the_least_tokens_ends_nothing_and_a_later_one_does(model: PreTrainedModel) -> None:
    (free,) = TorchEngine(model).generate(group_requests(1, 1, max_tokens=30, temperature=0.3))
    text = letters(free.tokens)
    # The rollout repeats itself at this temperature, so a letter occurs again.
    stop = next(each for each in text if text.count(each) > 1 and each != "-")
    first = text.index(stop)
    second = text.index(stop, first + 1)
    for least in (0, first, first + 1, second + 1):
        requests = group_requests(1, 1, max_tokens=30, temperature=0.3, stop_strings=(stop,), min_tokens=least)
        (rollout,) = TorchEngine(model, decode=letters).generate(requests)
        end = text.find(stop, least)
        assert rollout.tokens.tolist() == free.tokens[: end + 1 if end >= 0 else None].tolist()
        assert rollout.finish_reason == ("stop" if end >= 0 else "length")


def test_what_leaves_no_token_or_has_no_first_one_is_refused(model: PreTrainedModel) -> None:
    every = group_requests(1, 1, stop_tokens=tuple(range(VOCAB)), min_tokens=1)
    with pytest.raises(InputError, match="leaves no token to sample"):
        TorchEngine(model).submit(every)
    with pytest.raises(ConfigError, match="min_tokens must be at most max_tokens=4, got 5"):
        Sampling(max_tokens=4, min_tokens=5)
    (rollout,) = TorchEngine(model).generate(group_requests(1, 1, max_tokens=2, num_top_logprobs=1))
    assert rollout.branch(1, sample=3).top is None
    with pytest.raises(InputError, match="from a rollout's first token on"):
        Request(prompt_id="p0", prompt=[1], sampling=Sampling(max_tokens=9, num_top_logprobs=1), so_far=rollout)
