"""The limits of the CUDA kernels: supported dtypes and sizes. Imports no kernels."""

import torch

from treering.engine.decoder.cuda.passes import ROWS_OF_TILES
from treering.engine.decoder.weights import DecoderWeights


def unsupported_reason(weights: DecoderWeights) -> str | None:
    """Why the kernels do not support these weights, as the end of a sentence; None if they do.

    Example: float64 weights give "computes float32, bfloat16 and float16, and the model is torch.float64".
    """
    from treering.attention.triton.ops import INTERPRETED

    sizes, dtype = weights.sizes, weights.dtype
    if weights.device.type != "cuda" and not INTERPRETED:
        return f"computes on CUDA devices, and the model is on {weights.device}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"computes float32, bfloat16 and float16, and the model is {dtype}"
    if sizes.head_size > 128 or sizes.head_size % 2:
        return f"computes even head sizes up to 128, and the model has {sizes.head_size}"
    num_groups = sizes.num_heads // sizes.num_kv_heads
    if num_groups > ROWS_OF_TILES[-1]:
        return f"computes up to {ROWS_OF_TILES[-1]} query heads per key head, and the model has {num_groups}"
    return None
