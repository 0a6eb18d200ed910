"""Sampling and verification on the device draw the tokens of the specification."""

import numpy as np
import pytest
import torch

from tests.engine.decoder.cuda_cases import INTERPRETED_ONLY
from tests.engine.speculation.scripted_drafts import make_drafts
from treering.engine.batch.masked_sampling import sample_masked
from treering.engine.batch.rows import BatchState, make_columns
from treering.engine.batch.step_inputs import (
    MOST_DRAFTS,
    DraftTrees,
    StepInputs,
    VerifiedTokens,
    clip_drafts,
    sample_and_verify,
)
from treering.engine.batch.token_batch import of_sequence
from treering.engine.rehearsals import with_chains
from treering.engine.sampling.noise import row_key
from treering.engine.sampling.torch_sampling import sample
from treering.errors import StateError

gumbel_module = pytest.importorskip("treering.engine.decoder.cuda.verify")


def keys_of(num: int) -> torch.Tensor:
    return torch.tensor([row_key(3, f"p{index}", 0, index) for index in range(num)])


def everything(num: int) -> dict[str, torch.Tensor]:
    return {"top_k": torch.zeros(num, dtype=torch.int64), "top_p": torch.ones(num, dtype=torch.float64)}


@pytest.mark.parametrize("vocabulary", [5, 2600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_and_logprobs_are_those_of_the_specification(vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (3 * torch.randn(12, vocabulary, generator=generator)).to(dtype)
    logits[:, 1::7] = -torch.inf
    logits[5, :1024] = -torch.inf if vocabulary > 1024 else 0.0
    keys, positions = keys_of(12), torch.arange(12) * 1_000_003
    temperature = torch.linspace(0.05, 2.5, 12, dtype=torch.float64)
    samples = gumbel_module.gumbel_max(logits, keys, positions, temperature)
    expected = sample(logits, keys=keys, positions=positions, temperature=temperature, **everything(12))
    assert samples.tokens.tolist() == expected.tokens.tolist()
    assert torch.allclose(samples.logprobs, expected.logprobs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_invalid_logits_give_no_token_and_do_not_affect_other_rows(bad: float) -> None:
    logits = torch.zeros(3, 1500)
    logits[1] = bad if bad == -torch.inf else 0.0
    logits[1, 1400] = bad
    ones = torch.ones(3, dtype=torch.float64)
    samples = gumbel_module.gumbel_max(logits, keys_of(3), torch.arange(3), ones)
    assert (samples.tokens >= 0).tolist() == [True, False, True]
    assert torch.allclose(samples.logprobs[::2], -torch.tensor(1500.0, dtype=torch.float64).log())


verify = pytest.importorskip("treering.engine.decoder.cuda.verify")
pytestmark = INTERPRETED_ONLY
CPU = torch.device("cpu")
NOTHING = np.zeros(0, np.int64)


def random_tree(rng: np.random.Generator, vocabulary: int, most: int) -> tuple[list[int], list[int]]:
    tokens, parents = [], []
    for _ in range(int(rng.integers(0, most + 1))):
        parent, token = int(rng.integers(-1, len(tokens))), int(rng.integers(vocabulary))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


def drafts_of(trees: list[tuple[list[int], list[int]]], vocabulary: int) -> DraftTrees:
    return clip_drafts(make_drafts(trees), np.full(len(trees), MOST_DRAFTS), vocabulary)


def columns_of(num_rows: int) -> BatchState:
    columns = make_columns(max_rows=num_rows, max_context=8, max_stops=2)
    for row in range(num_rows):
        columns.keys[row] = row_key(0, "p", 0, row)
        columns.num_tokens[row] = 5 + 100 * row
        columns.temperature[row] = 0.4 + 0.1 * row
    return columns


def inputs_of(rows: list[int], drafts: DraftTrees) -> StepInputs:
    """Return step inputs that sample each row after its context and after each draft."""
    counts, sampled = 1 + np.diff(drafts.offsets)[rows], np.array(rows, np.int64)
    return StepInputs(of_sequence(np.arange(counts.sum())), sampled, sampled, np.cumsum(counts) - counts, NOTHING)


def assert_same(actual: VerifiedTokens, expected: VerifiedTokens) -> None:
    assert actual.num_tokens.tolist() == expected.num_tokens.tolist()
    for row, count in enumerate(expected.num_tokens):
        assert actual.tokens[row, :count].tolist() == expected.tokens[row, :count].tolist()
        assert actual.path[row].tolist() == expected.path[row].tolist()
        for name in ("logprobs", "policy_logprobs"):
            own = getattr(actual, name)[row, :count], getattr(expected, name)[row, :count]
            np.testing.assert_allclose(*own, rtol=0, atol=1e-12)
    for column, other in zip(actual, expected, strict=True):
        assert (column.shape, column.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("cut", ["everything", "top_k", "top_p", "min_p", "penalty"])
def test_trees_give_the_tokens_of_the_walk_on_cpu(seed: int, cut: str) -> None:
    rng = np.random.default_rng(seed)
    drafts = drafts_of([random_tree(rng, 3, 12) for _ in range(6)], 3)
    columns = columns_of(6)
    if cut == "top_k":
        columns.top_k[1::2] = 2
    if cut == "top_p":
        columns.top_p[::2] = 0.7
    if cut == "min_p":
        columns.log_min_p[::2] = np.log(0.4)
    if cut == "penalty":
        # A drafted token repeats its ancestors, so a context of one token shows whether they are counted.
        columns.tokens[:] = 1
        columns.num_tokens[:] = 1
        columns.penalty[::2] = 3.0
    inputs = inputs_of([0, 1, 2, 3, 4, 5], drafts)
    logits = torch.from_numpy(rng.normal(size=(inputs.batch.num_tokens, 3)).astype(np.float32))
    expected = sample_and_verify(logits, inputs, columns, drafts)
    assert_same(verify.DeviceSampler(CPU).sample_and_verify(logits, inputs, columns, drafts), expected)
    assert (expected.num_tokens > 1).any()


def test_rehearsed_chains_longer_than_any_draft_give_the_tokens_of_the_walk_on_cpu() -> None:
    rng, size = np.random.default_rng(0), 3 * MOST_DRAFTS + 5
    columns = columns_of(2)
    best = rng.integers(0, 5, size + 1).astype(np.int32)
    changed = best[:-1].copy()
    changed[2 * MOST_DRAFTS + 7] = (changed[2 * MOST_DRAFTS + 7] + 1) % 5
    drafts = with_chains(make_drafts([([], []), ([], [])]), {0: best[:-1], 1: changed})
    inputs = inputs_of([0, 1], drafts)
    logits = torch.from_numpy(np.tile(100 * np.eye(5, dtype=np.float32)[best], (2, 1)))
    expected = sample_and_verify(logits, inputs, columns, drafts)
    assert expected.num_tokens.tolist() == [size + 1, 2 * MOST_DRAFTS + 8]
    assert_same(verify.DeviceSampler(CPU).sample_and_verify(logits, inputs, columns, drafts), expected)


@pytest.mark.parametrize("has_duplicates", [False, True])
def test_rows_with_hidden_tokens_read_their_own_copies_of_the_logits(has_duplicates: bool) -> None:
    rng = np.random.default_rng(0)
    drafts, columns = drafts_of([random_tree(rng, 5, 12) for _ in range(6)], 5), columns_of(6)
    columns.stop_tokens[:] = [1, 3]
    columns.first_end[::2] = columns.num_tokens[::2] + 2
    inputs = inputs_of([0, 1, 2, 3, 4, 5], drafts)
    if has_duplicates:
        # Row 1 samples from the logits of row 0, which hides tokens.
        leaders, first_logits = (np.array([each[0], each[0], *each[2:]]) for each in (inputs.rows, inputs.first_logits))
        inputs = inputs._replace(leaders=leaders, first_logits=first_logits)
    logits = torch.from_numpy(rng.normal(size=(inputs.batch.num_tokens, 5)).astype(np.float32))
    samplers = (verify.DeviceSampler(CPU).sample_and_verify, sample_and_verify)
    actual, expected = (sample_masked(sampler, logits, inputs, columns, drafts)[0] for sampler in samplers)
    assert_same(actual, expected)
    assert not np.isin(expected.tokens[::2, 0], (1, 3)).any()
    assert np.isin(expected.tokens[1::2], (1, 3)).any()


def test_one_sampler_serves_steps_of_any_size() -> None:
    sampler, rng = verify.DeviceSampler(CPU), np.random.default_rng(0)
    for num_rows in (1, 7, 2):
        drafts = drafts_of([random_tree(rng, 3, 5) for _ in range(num_rows)], 3)
        columns, inputs = columns_of(num_rows), inputs_of([*range(num_rows)], drafts)
        logits = torch.from_numpy(rng.normal(size=(inputs.batch.num_tokens, 3)).astype(np.float32))
        assert_same(
            sampler.sample_and_verify(logits, inputs, columns, drafts),
            sample_and_verify(logits, inputs, columns, drafts),
        )


def test_invalid_logits_are_reported_with_their_row_if_sampled() -> None:
    drafts = drafts_of([([], []), ([0], [-1]), ([], [])], 2)
    columns, inputs = columns_of(3), inputs_of([0, 1, 2], drafts)
    logits = torch.tensor([[0.0, -torch.inf]]).repeat(4, 1)
    logits[2] = torch.nan
    with pytest.raises(StateError, match="row 1 have NaN"):
        verify.DeviceSampler(CPU).sample_and_verify(logits, inputs, columns, drafts)
    # The walk does not reach invalid logits after a rejected draft.
    logits[1] = torch.tensor([-torch.inf, 0.0])
    assert verify.DeviceSampler(CPU).sample_and_verify(logits, inputs, columns, drafts).num_tokens.tolist() == [1, 1, 1]


def test_duplicate_rows_sample_from_their_leaders_logits_with_their_own_noise() -> None:
    rng = np.random.default_rng(0)
    trees = [random_tree(rng, 3, 9), ([], []), random_tree(rng, 3, 4), ([], []), ([], [])]
    leaders = np.array([0, 0, 2, 0, 2])
    drafts, columns, rows = drafts_of(trees, 3), columns_of(5), np.arange(5)
    columns.num_tokens[:] = columns.num_tokens[leaders]
    first = np.array([0, 1 + len(trees[0][0])])[[0, 0, 1, 0, 1]]
    logits = torch.from_numpy(rng.normal(size=(2 + len(trees[0][0]) + len(trees[2][0]), 3)).astype(np.float32))
    inputs = StepInputs(of_sequence(np.arange(len(logits))), rows, leaders, first, NOTHING)
    # Give each row its own logits and drafts instead.
    apart = drafts_of([trees[leader] for leader in leaders], 3)
    indices = np.concatenate(
        [np.arange(at, at + 1 + len(trees[leader][0])) for at, leader in zip(first, leaders, strict=True)]
    )
    expected = sample_and_verify(logits[indices], inputs_of([*rows], apart), columns, apart)
    assert len({tuple(line) for line in expected.path[leaders == 0].tolist()}) > 1
    assert_same(sample_and_verify(logits, inputs, columns, drafts), expected)
    assert_same(verify.DeviceSampler(CPU).sample_and_verify(logits, inputs, columns, drafts), expected)
