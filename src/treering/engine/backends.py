"""Which decoder computes an engine's passes, and the memory and the way to draw that belong to it.

Knows the decoders there are and what each can compute. Knows nothing of batches. What is for CUDA is loaded, and triton
with it, when weights are there.
"""

from typing import Literal, NamedTuple, get_args

from treering.attention.triton import has_triton
from treering.engine.batch.draw import Draw, draw
from treering.engine.decoder.cpu.decoder import CpuDecoder, supports
from treering.engine.decoder.protocol import Decoder
from treering.engine.decoder.reference import TorchDecoder
from treering.engine.decoder.weights import DecoderWeights
from treering.engine.kv_cache.allocator import Arena, SpanAllocator
from treering.errors import ConfigError, UnsupportedError

Backend = Literal["auto", "fused", "cuda", "plain"]
"""fused: the CPU path, for float32 and float64. cuda: kernels of our own for float32, bfloat16 and float16 there, with
captured passes and pages that prompts share. plain: torch operations, for any device. auto: the first that can be."""

Timing = Literal["allowed", "never"]
"""never: for runs that must repeat bit for bit."""


class BackendParts(NamedTuple):
    """What computes an engine's passes.

    Example: `make_backend(weights, 1000, "auto")` for float32 weights on CPU is named "fused on cpu".
    """

    decoder: Decoder
    arena: Arena
    """Who owns which of the decoder's slots."""
    draw: Draw
    """See `treering.engine.batch.draw.draw`."""
    name: str
    """The backend, the device, and why it is not another where that may surprise."""


def make_backend(weights: DecoderWeights, num_slots: int, backend: Backend, timing: Timing = "allowed") -> BackendParts:
    """A decoder with an arena of `num_slots` and what belongs to it; `timing` says whether a clock may choose kernels.

    Raises:
        ConfigError: an unknown backend.
        UnsupportedError: "fused" or "cuda" for weights that it does not compute.

    Example: bfloat16 weights on CPU get the plain decoder from "auto", and "fused" and "cuda" refuse them.
    """
    if backend not in get_args(Backend):
        raise ConfigError(f"backend is one of {', '.join(get_args(Backend))}, got {backend!r}; choose one")
    device = weights.device.type
    if backend == "fused" or (backend == "auto" and supports(weights)):
        if not supports(weights):
            raise UnsupportedError(
                f"the fused backend computes float32 and float64 on cpu, and the model is {weights.dtype} on "
                f'{weights.device}; use backend="auto"'
            )
        return BackendParts(CpuDecoder(weights, num_slots), SpanAllocator(num_slots), draw, f"fused on {device}")
    lack = _lack_for_cuda(weights)
    if backend == "cuda" and lack is not None:
        raise UnsupportedError(f'the cuda backend {lack}; use backend="auto"')
    if backend == "cuda" or (backend == "auto" and device == "cuda" and lack is None):
        return _on_cuda(weights, num_slots, timing)
    reason = f" (cuda {lack})" if backend == "auto" and device == "cuda" else ""
    return BackendParts(TorchDecoder(weights, num_slots), SpanAllocator(num_slots), draw, f"plain on {device}{reason}")


def _lack_for_cuda(weights: DecoderWeights) -> str | None:
    """Why the kernels for CUDA do not compute these weights, to follow their name; None where they do."""
    if not has_triton():
        return "needs triton, which is not installed: pip install triton"
    from treering.engine.decoder.cuda.limits import lack_of

    return lack_of(weights)


def _on_cuda(weights: DecoderWeights, num_slots: int, timing: Timing) -> BackendParts:
    from treering.engine.decoder.cuda.decoder import CudaDecoder
    from treering.engine.decoder.cuda.verify import DeviceDrawer

    decoder = CudaDecoder(weights, num_slots, "measured" if timing == "allowed" else "torch")
    device = weights.device
    return BackendParts(decoder, decoder.spans, DeviceDrawer(device).draw, f"cuda on {device.type}")
