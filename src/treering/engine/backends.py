"""Choose an engine's decoder, with its key-value arena and sampler.

The CUDA modules, and triton with them, are imported only when weights on CUDA need them.
"""

from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import nn

from treering.attention.triton import has_triton
from treering.engine.batch.step_inputs import SampleAndVerify, sample_and_verify
from treering.engine.batch.token_batch import of_sequence
from treering.engine.decoder.cpu.cpu_decoder import CpuDecoder, supports
from treering.engine.decoder.decoder_weights import DecoderWeights
from treering.engine.decoder.plain_decoder import Decoder, TorchDecoder
from treering.engine.kv_cache import KVAllocator, SpanAllocator
from treering.errors import ConfigError, StateError, UnsupportedError
from treering.extras import install_hint
from treering.model.tree_model import TreeModel

_MOST_TOKENS = 6
# Far above rounding (1e-6, and 1e-2 in 16 bits) and far below the effect of a missing bias or norm.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
_TOLERANCE_16_BITS = 0.1

Backend = Literal["auto", "fused", "cuda", "plain"]
"""fused: compiled CPU code for float32 and float64. cuda: Treering's kernels for float32, bfloat16 and float16, with
captured passes and paged keys and values that prompts share. plain: torch operations, for any device. auto: the first
of these that supports the weights."""


class BackendParts(NamedTuple):
    """Decoder, arena and sampler of a backend.

    Example: `make_backend(weights, 1000, "auto")` for float32 weights on CPU is named "fused on cpu".
    """

    decoder: Decoder
    allocator: KVAllocator
    """Allocates the decoder's slots."""
    sampler: SampleAndVerify
    """Samples as `treering.engine.batch.step_inputs.sample_and_verify` does."""
    name: str
    """Backend and device; for "auto" also why a faster one was not chosen."""


def make_backend(
    weights: DecoderWeights,
    num_slots: int,
    backend: Backend,
    *,
    takes_images: bool = False,
) -> BackendParts:
    """Make a decoder with an arena of `num_slots`, and its sampler.

    Raises:
        ConfigError: for an unknown backend.
        UnsupportedError: if "fused" or "cuda" does not support the weights, or the model takes images.

    Example: bfloat16 weights on CPU get the plain decoder from "auto", and "fused" and "cuda" refuse them.
    """
    if backend not in get_args(Backend):
        raise ConfigError(f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}; choose one")
    if takes_images and backend in ("fused", "cuda"):
        raise UnsupportedError(
            f'the {backend} backend runs only text models, and this model takes images; use backend="auto"'
        )
    reason = "the model takes images" if takes_images else None
    if reason is None and (backend == "fused" or (backend == "auto" and supports(weights))):
        return _fused(weights, num_slots)
    if reason is None and (backend == "cuda" or (backend == "auto" and weights.device.type == "cuda")):
        unsupported = _cuda_unsupported_reason(weights)
        if unsupported is None:
            return _on_cuda(weights, num_slots)
        if backend == "cuda":
            raise UnsupportedError(f'the cuda backend {unsupported}; use backend="auto"')
        reason = f"cuda {unsupported}"
    name = f"plain on {weights.device.type}{f' ({reason})' if reason and backend == 'auto' else ''}"
    # "plain" is the off-switch: it samples with the compiled CPU reference on every device.
    sampler = sample_and_verify if backend == "plain" else _sampler_on(weights)
    return BackendParts(TorchDecoder(weights, num_slots), SpanAllocator(num_slots), sampler, name)


def _fused(weights: DecoderWeights, num_slots: int) -> BackendParts:
    if not supports(weights):
        raise UnsupportedError(
            f"the fused backend needs float32 or float64 on cpu, and the model is {weights.dtype} on "
            f'{weights.device}; use backend="auto"'
        )
    name = f"fused on {weights.device.type}"
    return BackendParts(CpuDecoder(weights, num_slots), SpanAllocator(num_slots), sample_and_verify, name)


def _cuda_unsupported_reason(weights: DecoderWeights) -> str | None:
    """Return why the CUDA kernels do not support these weights, as the end of a sentence; None if they do."""
    if not has_triton():
        return f"needs triton, which is not installed: {install_hint('gpu')}"
    from treering.engine.decoder.cuda.cuda_decoder import unsupported_reason

    return unsupported_reason(weights)


def _sampler_on(weights: DecoderWeights) -> SampleAndVerify:
    """Return a sampler that keeps the logits on a CUDA device, if triton is installed."""
    if weights.device.type != "cuda" or not has_triton():
        return sample_and_verify
    from treering.engine.decoder.cuda.verify import DeviceSampler

    return DeviceSampler(weights.device).sample_and_verify


def _on_cuda(weights: DecoderWeights, num_slots: int) -> BackendParts:
    from treering.engine.decoder.cuda.cuda_decoder import CudaDecoder
    from treering.engine.decoder.cuda.verify import DeviceSampler

    decoder = CudaDecoder(weights, num_slots)
    device = weights.device
    return BackendParts(decoder, decoder.allocator, DeviceSampler(device).sample_and_verify, f"cuda on {device.type}")


def check_decoder(model: TreeModel, decoder: Decoder, *, max_context: int) -> None:
    """Run a few tokens, at most `max_context`, through model and decoder and compare the logits.

    Raises:
        StateError: if the model's own logits contain NaN or +inf.
        UnsupportedError: if the logits differ by more than rounding.
    """
    tokens = np.arange(min(_MOST_TOKENS, max_context), dtype=np.int64) * 7919 % model.vocab_size
    name, expected = type(model.model).__name__, _model_logits(model.model, torch.from_numpy(tokens))
    if bool((expected.isnan() | expected.isposinf()).any()):
        raise StateError(
            f"an engine needs finite logits, and those of {name} contain NaN or +inf: its weights "
            "have diverged or are not loaded; start from an earlier checkpoint (model.path=...)"
        )
    actual = decoder.run(of_sequence(tokens)).to(expected)
    # -inf in both counts as equal; -inf in one gives an infinite error.
    differences = torch.where(actual == expected, 0.0, actual - expected)
    error = float(differences.norm() / expected[expected.isfinite()].norm().clamp_min(1e-30))
    if not error <= _TOLERANCE.get(expected.dtype, _TOLERANCE_16_BITS):
        raise UnsupportedError(
            f"the engine computes {name} from its weights, but the logits differ from the model's "
            f"by {error:.1e}: a layer has a hook, an adapter or its own forward, or norms elsewhere than Llama's; "
            "remove or merge it, or sample with vLLM"
        )


def _model_logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    modes = {module: module.training for module in model.modules()}
    device = next(model.parameters()).device
    model.eval()
    try:
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=tokens[None].to(device), use_cache=False).logits[0]
    finally:
        for module, mode in modes.items():
            module.training = mode
    return logits
