"""The CUDA decoder, in triton's interpreter, equals the plain one."""

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.engine.decoder.cuda_cases import APART, INTERPRETED_ONLY, Row, batch_of
from tests.models import VOCAB, build
from treering.engine.batch.token_batch import TokenBatch
from treering.engine.decoder.decoder_weights import DecoderWeights, read_weights
from treering.engine.decoder.plain_decoder import TorchDecoder
from treering.families import FAMILIES
from treering.model.tree_model import TreeModel

cuda = pytest.importorskip("treering.engine.decoder.cuda.cuda_decoder")
pytestmark = INTERPRETED_ONLY

NUM_SLOTS = 3 * APART
SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1}
FILLING = [Row(prefix=0, own=5, num_fed=5), Row(prefix=0, own=2, num_fed=2), Row(prefix=0, own=1)]
GROWING = [Row(prefix=0, own=6), Row(prefix=0, own=3, parents=(-1, 0, -1, 2)), Row(prefix=0, own=2, parents=(-1,))]


def weights_of(model: PreTrainedModel) -> DecoderWeights:
    return read_weights(TreeModel.of(model), num_positions=64)


def wanting(batch: TokenBatch, wanted: list[int]) -> TokenBatch:
    fields = {name: getattr(batch, name) for name in TokenBatch.__slots__}
    return TokenBatch(**fields | {"wanted": np.array(wanted, np.int64)})


def both(weights: DecoderWeights, batches: list[TokenBatch]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    decoders = cuda.CudaDecoder(weights, NUM_SLOTS), TorchDecoder(weights, NUM_SLOTS)
    return tuple([decoder.run(batch).clone() for batch in batches] for decoder in decoders)


def assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        one, other = one.float(), other.float()
        assert float((one - other).norm()) <= tolerance * float(other.norm())


@pytest.mark.parametrize("family", [name for name, one in FAMILIES.items() if one.engine == "always"])
def test_chains_and_trees_give_the_logits_of_the_plain_decoder(family: str) -> None:
    model = build(family, attention_bias=True) if family in ("qwen3", "llama") else build(family)
    batches = [batch_of(rows, VOCAB) for rows in (FILLING, GROWING)]
    assert_close(*both(weights_of(model), batches), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_as_rounding_goes(dtype: torch.dtype) -> None:
    batches = [batch_of(rows, VOCAB) for rows in (FILLING, GROWING)]
    assert_close(*both(weights_of(build("qwen3", **SMALL).to(dtype)), batches), 0.05)


def test_a_pass_that_wants_few_logits_or_none_writes_the_same_keys() -> None:
    filling, growing = (batch_of(rows, VOCAB) for rows in (FILLING, GROWING))
    batches = [wanting(filling, [4, 7]), wanting(growing, []), growing]
    assert_close(*both(weights_of(build("qwen3", **SMALL)), batches), 1e-5)


def test_padding_tokens_touch_no_page_in_use() -> None:
    decoder = cuda.CudaDecoder(weights_of(build("qwen3", **SMALL)), NUM_SLOTS)
    before = decoder._keys[:, :, :-16].clone()
    (single,) = (batch_of([Row(prefix=0, own=3, num_fed=3)], VOCAB),)
    decoder.run(single)
    changed = (decoder._keys[:, :, :-16] != before).any(-1).any(1).any(0)
    # Three tokens run in a bucket of four.
    assert changed.nonzero()[:, 0].tolist() == single.slots.tolist()


def test_moved_slots_are_read_at_their_targets() -> None:
    weights = weights_of(build("qwen3", **SMALL))
    decoder, plain = cuda.CudaDecoder(weights, NUM_SLOTS), TorchDecoder(weights, NUM_SLOTS)
    later = batch_of([Row(prefix=0, own=7)], VOCAB)
    outputs = []
    for one in (decoder, plain):
        one.run(batch_of([Row(prefix=0, own=2, num_fed=2, parents=(-1, -1, 1, 2))], VOCAB))
        start = APART // 2 + 2
        one.move(np.array([start + 1, start + 2, start + 3]), np.array([start, start + 1, start + 2]))
        outputs.append([one.run(later).clone()])
    assert_close(*outputs, 1e-5)


def test_pages_in_any_place_give_the_same_bits() -> None:
    weights = weights_of(build("qwen3", **SMALL))
    row = batch_of([Row(prefix=0, own=20, num_fed=20)], VOCAB)
    fields = {name: getattr(row, name) for name in TokenBatch.__slots__}
    outputs, pages = [], []
    for num_taken in (0, 3):
        decoder = cuda.CudaDecoder(weights, NUM_SLOTS)
        taken = [decoder.allocator.allocate(16) for _ in range(num_taken)]
        for address in taken[:2]:
            decoder.allocator.free(address)
        start = decoder.allocator.allocate(40)
        shift = start - APART // 2
        shifted = {"slots": row.slots + shift, "own_start": row.own_start + shift}
        outputs.append(decoder.run(TokenBatch(**fields | shifted)).clone())
        pages.append(decoder.allocator.table[start // 16 :][:3].tolist())
    assert torch.equal(*outputs)
    # The first span has its pages in order; the second reuses freed pages, then takes another.
    assert pages == [[0, 1, 2], [1, 0, 3]]
