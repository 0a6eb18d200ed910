"""Law 2, forward: log-probs and entropies of a forest equal those of its sequences run one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.backends import EXACT_BACKENDS
from tests.forests import SHAPES, sequence_sets
from tests.largest_tensor import LargestTensor
from tests.models import FAMILIES, VOCAB, assert_gradients_equal, build, build_float64, flat_logprobs, take_gradients
from treering.errors import ConfigError, InputError
from treering.model.forward import forward, per_token_logps
from treering.tree.forest import Forest

MODEL = build_float64()


def assert_forward_is_exact(
    model: torch.nn.Module, sequences: list[list[int]], tolerance: float, **options: object
) -> None:
    forest = Forest.from_sequences(sequences)
    with torch.no_grad():
        out = forward(model, forest, **options)  # type: ignore[arg-type]
        for i, sequence in enumerate(sequences):
            path = torch.from_numpy(forest.path(i)).long()
            logprobs, entropy = flat_logprobs(model, sequence, float(options.get("temperature", 1.0)))  # type: ignore[arg-type]
            torch.testing.assert_close(out.logprobs[path][1:], logprobs, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(out.entropy[path][1:], entropy, atol=tolerance, rtol=tolerance)
            assert out.logprobs[path][0] == out.entropy[path][0] == 0


@given(sequence_sets(max_sequences=5))
@settings(max_examples=25)
def test_a_forest_scores_like_its_sequences_one_by_one(sequences: list[list[int]]) -> None:
    assert_forward_is_exact(MODEL, sequences, 1e-12)


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_scores_like_its_sequences(name: str, backend: str) -> None:
    assert_forward_is_exact(MODEL, SHAPES[name][:12], 1e-12, backend=backend)


@pytest.mark.parametrize(("family", "tied"), [(family, bool(i % 2)) for i, family in enumerate(FAMILIES)])
def test_every_family_is_exact_with_tied_and_untied_heads(family: str, tied: bool) -> None:
    model = build_float64(family, tie_word_embeddings=tied)
    assert_forward_is_exact(model, SHAPES["long segments"], 1e-12, temperature=0.7)


@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
def test_grouped_and_multi_query_heads_are_exact(num_key_value_heads: int) -> None:
    model = build_float64(num_key_value_heads=num_key_value_heads)
    assert_forward_is_exact(model, SHAPES["long segments"], 1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_code_in_float32_stays_within_1e_5(family: str) -> None:
    assert_forward_is_exact(build(family), SHAPES["long segments"], 1e-5)


@pytest.mark.parametrize("max_entries", [VOCAB, 7 * VOCAB])
def test_scoring_in_chunks_changes_nothing(max_entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treering.model.edges.MAX_LOGIT_ENTRIES", {"cpu": max_entries})
    assert_forward_is_exact(MODEL, SHAPES["long segments"], 1e-12)


def test_only_wanted_edges_are_scored() -> None:
    forest = Forest.from_sequences([[5, 6, 7], [5, 6, 8]])
    everything = forward(MODEL, forest)
    wanted = np.array([True, False, True, False])
    some = forward(MODEL, forest, wanted=wanted)
    assert some.logprobs.tolist() == pytest.approx([0, 0, float(everything.logprobs[2].detach()), 0])
    assert forward(MODEL, forest, entropy_of="none").entropy.tolist() == [0, 0, 0, 0]


def test_an_empty_forest_gives_empty_outputs_and_single_tokens_give_zeros() -> None:
    assert forward(MODEL, Forest.from_sequences([])).logprobs.shape == (0,)
    assert forward(MODEL, Forest.from_sequences([[1], [2]])).logprobs.tolist() == [0, 0]


@pytest.mark.usefixtures("unchecked")
def test_invalid_forests_tokens_and_options_are_refused_with_the_value() -> None:
    with pytest.raises(InputError, match=r"expected a Forest, got list; make one with Forest\.from_sequences"):
        forward(MODEL, [[1, 2]])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="temperature must be a positive number, got '1'"):
        forward(MODEL, Forest.from_sequences([[0]]), temperature="1")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="entropy_of must be one of all, none, got 'some'"):
        forward(MODEL, Forest.from_sequences([[0]]), entropy_of="some")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"token id {VOCAB + 3} at packed index 1 is outside.*vocabulary of {VOCAB}"):
        forward(MODEL, Forest.from_sequences([[0, VOCAB + 3]]))
    for temperature in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match=f"temperature must be a positive number, got {temperature}"):
            forward(MODEL, Forest.from_sequences([[0]]), temperature=temperature)
    with pytest.raises(InputError, match=r"one entry per token \(1\), got shape \(2,\)"):
        forward(MODEL, Forest.from_sequences([[0]]), wanted=np.ones(2, bool))
    wanted = forward(MODEL, Forest.from_sequences([[5, 6, 7]]), wanted=[0, 0, 1])  # type: ignore[arg-type]
    assert [value != 0 for value in wanted.logprobs.tolist()] == [False, False, True]


@pytest.mark.parametrize("vocab_size", [10, 100])
def test_the_vocabulary_is_what_embedding_and_head_hold(vocab_size: int) -> None:
    model = build()
    model.config.vocab_size = vocab_size
    assert forward(model, Forest.from_sequences([[VOCAB - 1, 2]])).logprobs.shape == (2,)
    with pytest.raises(InputError, match=f"vocabulary of {VOCAB}"):
        forward(model, Forest.from_sequences([[VOCAB, 2]]))


def test_a_plain_head_holds_few_logits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = 4096
    model = build(vocab_size=vocab)
    forest = Forest.from_sequences(SHAPES["long segments"])
    monkeypatch.setattr("treering.model.edges.MAX_LOGIT_ENTRIES", {"cpu": 5 * vocab})
    with LargestTensor() as largest:
        forward(model, forest).logprobs.sum().backward()
    weights = max(weight.numel() for weight in model.parameters())
    assert largest.num_entries == weights < forest.num_tokens * vocab


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    sequences = [[5, 6, 7, 8, 9], [5, 6, 7, 10], [5, 6, 11, 12, 13, 14], [5, 6, 7, 8, 9], [20, 21]]
    ids, mask = torch.zeros(5, 7, dtype=torch.long), torch.zeros(5, 7, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        begin = {"left": 7 - len(sequence), "right": 0, "both": 1}[side]
        ids[row, begin : begin + len(sequence)] = torch.tensor(sequence)
        mask[row, begin : begin + len(sequence)] = 1
    return ids, mask


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_moe"])
def test_log_probs_of_a_padded_batch_are_those_of_the_stock_models_padded_forward(family: str, side: str) -> None:
    model, (ids, mask) = build_float64(family), padded(side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits / 0.7
    stock = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0] * mask[:, 1:] * mask[:, :-1]
    weights = torch.arange(30.0, dtype=torch.float64).reshape(5, 6) + 1
    (stock * weights).sum().backward()
    expected = take_gradients(model)
    forest, indices = Forest.from_padded(ids, mask)
    found = per_token_logps(model, forest, 0.7, indices=indices)
    assert found.shape == ids.shape
    assert found[:, 0].tolist() == [0.0] * 5
    assert (found[:, 1:] - stock).abs().max() <= 1e-10
    (found[:, 1:] * weights).sum().backward()
    assert_gradients_equal(take_gradients(model), expected, 1e-10)


def test_without_indices_a_branch_is_a_row_padded_on_the_right_and_a_mask_leaves_entries_out() -> None:
    model, (ids, mask) = build_float64("qwen3"), padded("right")
    forest, indices = Forest.from_padded(ids, mask)
    every = per_token_logps(model, forest)
    assert every.shape == (5, 6)
    assert every.equal(per_token_logps(model, forest, indices=indices)[:, :6])
    wanted = torch.zeros(5, 6).long()
    wanted[:, 3:] = 1
    assert (per_token_logps(model, forest, mask=wanted) - every * wanted).abs().max() <= 1e-12
    own = flat_logprobs(model, [5, 6, 7, 10])[0]
    assert (every[1, 1:4] - own).abs().max() <= 1e-12
    with pytest.raises(InputError, match=r"shape of indices, \(5, 6\), got \(5, 7\)"):
        per_token_logps(model, forest, mask=mask)
    with pytest.raises(InputError, match=r"below 12, -1 at padding, got shape \(1, 1\) with 14"):
        per_token_logps(model, forest, indices=np.array([[14]]))
