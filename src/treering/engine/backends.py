"""Which decoder computes an engine's passes.

Knows the decoders there are and what each can compute. Knows nothing of batches.
"""

from typing import Literal, get_args

from treering.engine.decoder import Decoder
from treering.engine.decoder_cpu import CpuDecoder, supports
from treering.engine.decoder_torch import TorchDecoder
from treering.engine.weights import DecoderWeights
from treering.errors import ConfigError, UnsupportedError

Backend = Literal["auto", "fused", "plain"]
"""fused: the CPU path, for float32 and float64. plain: torch operations, for any device. auto: fused if it can be."""


def make_decoder(weights: DecoderWeights, num_slots: int, backend: Backend) -> Decoder:
    """A decoder with an arena of `num_slots`.

    Raises:
        ConfigError: an unknown backend.
        UnsupportedError: "fused" for weights that it does not compute.

    Example: bfloat16 weights get the plain decoder from "auto", and "fused" refuses them.
    """
    if backend not in get_args(Backend):
        raise ConfigError(f"backend is one of {', '.join(get_args(Backend))}, got {backend!r}; choose one")
    if backend == "fused" and not supports(weights):
        raise UnsupportedError(
            f"the fused backend computes float32 and float64 on cpu, and the model is {weights.dtype} on "
            f'{weights.device}; use backend="auto"'
        )
    fused = backend != "plain" and supports(weights)
    return CpuDecoder(weights, num_slots) if fused else TorchDecoder(weights, num_slots)


def name_of(decoder: Decoder) -> Backend:
    """The backend that a decoder belongs to: "fused" or "plain"."""
    return "fused" if isinstance(decoder, CpuDecoder) else "plain"
