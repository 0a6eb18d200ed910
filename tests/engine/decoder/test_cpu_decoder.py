"""The fused decoder changes the memory layout of weights; readers see the same values, and updates arrive."""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.models import build_float64
from treering.engine.batch.token_batch import of_sequence
from treering.engine.decoder.cpu import cpu_decoder
from treering.engine.decoder.cpu.cpu_decoder import CpuDecoder
from treering.engine.decoder.decoder_weights import DecoderWeights, read_weights
from treering.engine.decoder.plain_decoder import Decoder
from treering.model.tree_model import TreeModel

TOKENS = np.array([3, 1, 4, 1, 5])


def weights_of(model: PreTrainedModel) -> DecoderWeights:
    return read_weights(TreeModel.of(model), num_positions=16)


def matrices_of(weights: DecoderWeights) -> list[Tensor]:
    layers = [matrix for layer in weights.layers for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    return [*layers, weights.head]


def logits_of(decoder: Decoder) -> np.ndarray:
    return decoder.run(of_sequence(TOKENS)).numpy().copy()


@pytest.mark.parametrize("is_inference", [False, True])
def test_transposed_matrices_keep_their_values(is_inference: bool) -> None:
    model = build_float64("qwen2")
    with torch.inference_mode(is_inference):
        weights = weights_of(model)
    expected = [matrix.clone() for matrix in matrices_of(weights)]
    CpuDecoder(weights, num_slots=8)
    for matrix, before in zip(matrices_of(weights), expected, strict=True):
        assert matrix.T.is_contiguous()
        assert torch.equal(matrix, before)


def test_matrices_larger_than_a_cores_cache_are_not_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_decoder, "_MOST_LAID_OUT", 0)
    weights = weights_of(build_float64("qwen3"))
    CpuDecoder(weights, num_slots=8)
    assert all(matrix.is_contiguous() for matrix in matrices_of(weights))


def test_new_weights_reach_a_decoder_with_transposed_matrices() -> None:
    model = build_float64("qwen3")
    weights = weights_of(model)
    decoder = CpuDecoder(weights, num_slots=8)
    before = logits_of(decoder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    np.testing.assert_array_equal(logits_of(decoder), before)
    weights.read(TreeModel.of(model))
    np.testing.assert_array_equal(logits_of(decoder), logits_of(CpuDecoder(weights_of(model), num_slots=8)))
    assert np.abs(logits_of(decoder) - before).max() > 1e-3
