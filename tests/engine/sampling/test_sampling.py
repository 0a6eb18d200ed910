"""Tokens are sampled from exactly the requested distribution, with keyed noise."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process

from tests.engine.sampling.sampling_cases import (
    DRAW,
    NUM_ROLLOUTS,
    Floats,
    Rule,
    assert_distribution,
    draw_numba,
    draw_torch,
    expected_probabilities,
    rollout_keys,
    verified,
)
from treering.arrays import Int64Array
from treering.engine.sampling.noise import uniforms
from treering.engine.sampling.torch_sampling import diverged, sample
from treering.errors import StateError

LOGITS = np.array([1.5, -0.3, 0.7, 0.7, -2.0, 0.1])
RULES = [
    *(Rule(temperature=temperature) for temperature in (1.0, 0.6)),
    *(Rule(top_k=1), Rule(1.7, top_k=3), Rule(top_k=6)),
    *(Rule(top_p=0.8), Rule(0.6, top_p=0.45), Rule(1.7, top_k=3, top_p=0.8)),
    *(Rule(min_p=0.05), Rule(0.6, min_p=1.0), Rule(top_k=3, min_p=0.3), Rule(0.6, top_k=5, top_p=0.8, min_p=0.2)),
]
PENALISED = [
    replace(rule, penalty=penalty, context=context)
    for rule in (Rule(), Rule(temperature=0.6, top_k=3), Rule(top_p=0.8, min_p=0.1))
    for penalty, context in [(1.5, (0, 4)), (0.7, (1, 1, 3)), (30.0, (0, 1, 2, 3, 4, 5))]
]


@pytest.mark.parametrize("how", list(DRAW))
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_tokens_have_the_requested_distribution(rule: Rule, how: str) -> None:
    # Use many rollouts at a few positions each, because noise is independent along both.
    keys, positions = np.repeat(rollout_keys(NUM_ROLLOUTS // 10), 10), np.tile(np.arange(10), NUM_ROLLOUTS // 10)
    drawn = DRAW[how](np.tile(LOGITS, (NUM_ROLLOUTS, 1)), keys, positions, rule)
    assert_distribution(drawn.tokens, expected_probabilities(LOGITS, rule))


@pytest.mark.parametrize("how", list(DRAW))
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_both_logprobs_are_those_of_their_distributions(rule: Rule, how: str) -> None:
    drawn = DRAW[how](np.tile(LOGITS, (200, 1)), rollout_keys(200), np.arange(200), rule)
    processed, policy = expected_probabilities(LOGITS, rule), expected_probabilities(LOGITS, Rule(rule.temperature))
    np.testing.assert_allclose(drawn.logprobs, np.log(processed[drawn.tokens]), rtol=0, atol=1e-14)
    np.testing.assert_allclose(drawn.policy_logprobs, np.log(policy[drawn.tokens]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("how", list(DRAW))
def test_the_token_is_the_gumbel_max_of_its_keyed_noise(how: str) -> None:
    keys, positions = rollout_keys(300), np.arange(300) * 5
    noise = uniforms(torch.from_numpy(keys), torch.from_numpy(positions), 6).numpy()
    expected = (expected_probabilities(LOGITS, Rule()) / -np.log(noise)).argmax(1)
    drawn = DRAW[how](np.tile(LOGITS, (300, 1)), keys, positions, Rule())
    np.testing.assert_array_equal(drawn.tokens, expected)


@pytest.mark.parametrize("how", list(DRAW))
@pytest.mark.parametrize("rule", PENALISED, ids=str)
def test_a_penalty_counts_each_repeated_token_once_and_only_in_logprobs(rule: Rule, how: str) -> None:
    keys, positions = rollout_keys(NUM_ROLLOUTS), np.full(NUM_ROLLOUTS, 8)
    drawn = DRAW[how](np.tile(LOGITS, (NUM_ROLLOUTS, 1)), keys, positions, rule)
    processed, policy = expected_probabilities(LOGITS, rule), expected_probabilities(LOGITS, Rule(rule.temperature))
    assert_distribution(drawn.tokens, processed)
    np.testing.assert_allclose(drawn.logprobs, np.log(processed[drawn.tokens]), rtol=0, atol=1e-14)
    np.testing.assert_allclose(drawn.policy_logprobs, np.log(policy[drawn.tokens]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("rule", [*RULES, *PENALISED], ids=str)
def test_cuts_and_penalty_are_those_of_hugging_face(rule: Rule) -> None:
    # Avoid ties, which Hugging Face cuts elsewhere.
    logits = LOGITS + 0.01 * np.arange(LOGITS.size)
    scores, context = torch.from_numpy(logits)[None], torch.tensor([rule.context or (0,)])
    steps: list[logits_process.LogitsProcessor] = [
        logits_process.RepetitionPenaltyLogitsProcessor(rule.penalty),
        logits_process.TemperatureLogitsWarper(rule.temperature),
    ]
    steps += [logits_process.TopKLogitsWarper(rule.top_k)] if rule.top_k else []
    steps += [logits_process.TopPLogitsWarper(rule.top_p)] if rule.top_p < 1 else []
    steps += [logits_process.MinPLogitsWarper(rule.min_p)] if rule.min_p else []
    for step in steps:
        scores = step(context, scores)
    np.testing.assert_allclose(expected_probabilities(logits, rule), scores.softmax(-1)[0].numpy(), atol=1e-12)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Floats, Int64Array, Int64Array]:
    """Draw rows of one size: generic, tied, all equal, one-hot, far apart, or with hidden tokens."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num, vocab_size = 8, draw(st.sampled_from([1, 2, 3, 63, 64, 65, 130, 1000]))
    logits = rng.normal(size=(num, vocab_size)) * draw(st.sampled_from([0.0, 1e-9, 1.0, 4.0, 1e4, 1e30]))
    shape = draw(st.sampled_from(["generic", "ties", "one-hot", "hidden", "ascending"]))
    if shape == "ties":
        logits = np.round(np.clip(logits, -5, 5))
    elif shape == "one-hot":
        logits = np.zeros_like(logits)
        logits[np.arange(num), rng.integers(vocab_size, size=num)] = 50.0
    elif shape == "hidden":
        logits[:, rng.permutation(vocab_size)[: vocab_size // 2]] = -np.inf
    elif shape == "ascending":
        logits = np.sort(logits, axis=1)
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    return logits.astype(dtype), rng.integers(-(2**63), 2**63 - 1, num), rng.integers(0, 10**6, num)


@settings(max_examples=400)
@given(
    batches(),
    st.sampled_from([1.0, 0.7, 1.9, 1e-3, 1e-300, 1e300]),
    st.sampled_from([0, 1, 2, 5, 40, 64, 700, 10**9]),
    st.sampled_from([1.0, 0.95, 0.5, 0.2, 1e-15, 1 - 1e-9]),
    st.sampled_from([0.0, 0.0, 1.0, 0.5, 0.01, 1e-300]),
    st.sampled_from([1.0, 1.0, 1.3, 0.5, 1e3]),
)
def test_numba_draws_the_tokens_of_the_specification(
    batch: tuple[Floats, Int64Array, Int64Array],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalty: float,
) -> None:
    rule = Rule(temperature, top_k, top_p, min_p, penalty, (0,) if penalty != 1 else ())
    batch = batch[0], batch[1], np.minimum(batch[2], 50) + 1
    expected, drawn = draw_torch(*batch, rule), draw_numba(*batch, rule)
    np.testing.assert_array_equal(drawn.tokens, expected.tokens)
    np.testing.assert_allclose(drawn.logprobs, expected.logprobs, rtol=1e-15, atol=1e-12)
    np.testing.assert_allclose(drawn.policy_logprobs, expected.policy_logprobs, rtol=1e-15, atol=1e-12)


@pytest.mark.parametrize("rule", [Rule(), Rule(top_k=900)], ids=str)
def test_pruning_loses_no_narrow_gumbel_max(rule: Rule) -> None:
    # Among many similar tokens, one winner in fifty beats the runner-up by less than a fiftieth.
    logits = np.random.default_rng(3).normal(size=(1500, 1000)) * 0.1
    batch = logits, rollout_keys(1500), np.arange(1500)
    np.testing.assert_array_equal(draw_numba(*batch, rule).tokens, draw_torch(*batch, rule).tokens)


@pytest.mark.parametrize("how", list(DRAW))
@given(st.integers(0, 2**32), st.integers(0, 12), st.sampled_from([1.0, 0.9, 0.6, 0.25, 0.1]))
def test_ties_are_cut_to_the_smaller_ids(how: str, seed: int, top_k: int, top_p: float) -> None:
    logits = np.random.default_rng(seed).integers(0, 3, 9).astype(np.float64)
    expected = expected_probabilities(logits, Rule(top_k=top_k, top_p=top_p))
    drawn = DRAW[how](np.tile(logits, (100, 1)), rollout_keys(100), np.arange(100), Rule(top_k=top_k, top_p=top_p))
    assert expected[drawn.tokens].min() > 0
    np.testing.assert_allclose(drawn.logprobs, np.log(expected[drawn.tokens]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("how", list(DRAW))
@pytest.mark.parametrize(
    ("top_p", "num_kept"), [(0.3, 1), (0.4, 2), (0.5, 3), (0.6, 4), (0.7, 5), (0.8, 6), (0.9, 7), (0.95, 8)]
)
def test_mass_equal_to_top_p_reaches_it(how: str, top_p: float, num_kept: int) -> None:
    # In float64, 0.3 + 0.1 may be less than 0.4, depending on the order of adding and dividing.
    logits = np.tile(np.log([0.3] + 7 * [0.1]), (400, 1))
    drawn = DRAW[how](logits, rollout_keys(400), np.arange(400), Rule(top_p=top_p))
    assert set(drawn.tokens.tolist()) == set(range(num_kept))


@pytest.mark.gpu
def test_cuda_samples_the_same_tokens() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(500, 700)))
    rows = {"keys": torch.arange(500), "positions": torch.arange(500), "top_k": torch.arange(500) % 60}
    rows |= {"temperature": torch.linspace(0.3, 2, 500).double(), "top_p": torch.linspace(0.1, 1, 500).double()}
    expected = sample(logits, **rows)
    drawn = sample(logits.cuda(), **{name: values.cuda() for name, values in rows.items()})
    assert torch.equal(drawn.tokens.cpu(), expected.tokens)
    torch.testing.assert_close(drawn.logprobs.cpu(), expected.logprobs, rtol=0, atol=1e-12)


NOT_LOGITS = {"nan": [0.0, np.nan, 1.0], "inf": [0.0, np.inf, 1.0], "all hidden": [-np.inf] * 3}


@pytest.mark.parametrize("rule", [Rule(), Rule(top_k=2), Rule(top_p=0.5)], ids=str)
@pytest.mark.parametrize("values", list(NOT_LOGITS.values()), ids=list(NOT_LOGITS))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_diverged_logits_are_refused_with_their_row(rule: Rule, values: list[float], dtype: type) -> None:
    logits = np.zeros((4, 3), dtype)
    logits[2] = values
    logits[3] = values
    with pytest.raises(StateError, match="row 2 have") as refused:
        draw_torch(logits, np.arange(4), np.arange(4), rule)
    assert str(refused.value) == str(diverged(2))
    assert verified(logits, np.zeros((4, 0), np.int32), np.arange(4), np.arange(4), rule).code == 2


@pytest.mark.parametrize("how", list(DRAW))
@pytest.mark.parametrize("rule", [Rule(), Rule(top_k=3), Rule(top_p=0.9)], ids=str)
def test_a_hidden_token_is_never_sampled(how: str, rule: Rule) -> None:
    logits = np.array([0.3, -np.inf, 0.0, -np.inf])
    drawn = DRAW[how](np.tile(logits, (NUM_ROLLOUTS, 1)), rollout_keys(NUM_ROLLOUTS), np.zeros(NUM_ROLLOUTS, int), rule)
    assert_distribution(drawn.tokens, expected_probabilities(logits, rule))
