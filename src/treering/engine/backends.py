"""Chooses an engine's decoder, and the sampler that goes with it.

The CUDA modules, and triton with them, are imported only when weights on CUDA need them.
"""

from typing import Literal, NamedTuple, get_args

from treering.attention.triton import has_triton
from treering.engine.batch.sampler import SampleAndVerify, sample_and_verify
from treering.engine.decoder.cpu.decoder import CpuDecoder, supports
from treering.engine.decoder.protocol import Decoder
from treering.engine.decoder.reference import TorchDecoder
from treering.engine.decoder.weights import DecoderWeights
from treering.errors import ConfigError, UnsupportedError

Backend = Literal["auto", "fused", "cuda", "plain"]
"""fused: the CPU path, for float32 and float64. cuda: our own kernels for float32, bfloat16 and float16, with captured
passes. plain: torch operations, for any device. auto: the first of these
that supports the weights."""

Timing = Literal["allowed", "never"]
"""Whether a clock may choose kernels. never: for runs that must repeat bit for bit."""


class BackendParts(NamedTuple):
    """A decoder and its sampler.

    Example: `make_backend(weights, 1000, "auto")` for float32 weights on CPU is named "fused on cpu".
    """

    decoder: Decoder
    sampler: SampleAndVerify
    """See `treering.engine.batch.sampler.sample_and_verify`."""
    name: str
    """The backend and the device; for "auto" also why it is not another one."""


def make_backend(
    weights: DecoderWeights,
    num_slots: int,
    backend: Backend,
    timing: Timing = "allowed",
    *,
    takes_pictures: bool = False,
) -> BackendParts:
    """Makes a decoder with an arena of `num_slots`, and its sampler.

    Raises:
        ConfigError: an unknown backend.
        UnsupportedError: "fused" or "cuda" for weights that it does not support, or for a model that takes pictures.

    Example: bfloat16 weights on CPU get the plain decoder from "auto", and "fused" and "cuda" refuse them.
    """
    if backend not in get_args(Backend):
        raise ConfigError(f"backend is one of {', '.join(get_args(Backend))}, got {backend!r}; choose one")
    if takes_pictures and backend in ("fused", "cuda"):
        raise UnsupportedError(
            f'the {backend} backend computes models of text, and this model takes pictures; use backend="auto"'
        )
    reason = "the model takes pictures" if takes_pictures else None
    if reason is None and (backend == "fused" or (backend == "auto" and supports(weights))):
        return _fused(weights, num_slots)
    if reason is None and (backend == "cuda" or (backend == "auto" and weights.device.type == "cuda")):
        unsupported = _cuda_unsupported_reason(weights)
        if unsupported is None:
            return _on_cuda(weights, num_slots, timing)
        if backend == "cuda":
            raise UnsupportedError(f'the cuda backend {unsupported}; use backend="auto"')
        reason = f"cuda {unsupported}"
    name = f"plain on {weights.device.type}{f' ({reason})' if reason and backend == 'auto' else ''}"
    # The off-switch samples by the reference's compiled form, whatever the device.
    sampler = sample_and_verify if backend == "plain" else _sampler_on(weights)
    return BackendParts(TorchDecoder(weights, num_slots), sampler, name)


def _fused(weights: DecoderWeights, num_slots: int) -> BackendParts:
    if not supports(weights):
        raise UnsupportedError(
            f"the fused backend computes float32 and float64 on cpu, and the model is {weights.dtype} on "
            f'{weights.device}; use backend="auto"'
        )
    name = f"fused on {weights.device.type}"
    return BackendParts(CpuDecoder(weights, num_slots), sample_and_verify, name)


def _cuda_unsupported_reason(weights: DecoderWeights) -> str | None:
    """Why the CUDA kernels do not support these weights, as the end of a sentence; None if they do."""
    if not has_triton():
        return "needs triton, which is not installed: pip install triton"
    from treering.engine.decoder.cuda.decoder import unsupported_reason

    return unsupported_reason(weights)


def _sampler_on(weights: DecoderWeights) -> SampleAndVerify:
    """A sampler that leaves the logits on a CUDA device, where triton is there."""
    if weights.device.type != "cuda" or not has_triton():
        return sample_and_verify
    from treering.engine.decoder.cuda.verify import DeviceSampler

    return DeviceSampler(weights.device).sample_and_verify


def _on_cuda(weights: DecoderWeights, num_slots: int, timing: Timing) -> BackendParts:
    from treering.engine.decoder.cuda.decoder import CudaDecoder
    from treering.engine.decoder.cuda.verify import DeviceSampler

    decoder = CudaDecoder(weights, num_slots, "measured" if timing == "allowed" else "torch")
    device = weights.device
    return BackendParts(decoder, DeviceSampler(device).sample_and_verify, f"cuda on {device.type}")
