"""The baseline of a decode step: transformers' `generate` with a static cache, whose decoding it compiles on CUDA."""

import statistics
import time

import torch
from torch import Tensor
from transformers import PreTrainedModel


class _Times:
    """A streamer that records when each token arrives on the host, where the device is done with it."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: Tensor) -> None:
        """Notes the time."""
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""


def seconds_per_token(model: PreTrainedModel, batch: int, num_prompt: int, num_new: int) -> float:
    """Median seconds from one token of all rows to the next, greedy, in a second call; the first one compiles.

    It compiles for this number of rows alone: with kernels of another call left, torch would compile for any number.

    Example: 3 new tokens have 2 steps between them, the median of which is their mean.
    """
    forget_compiled(model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (batch, num_prompt), generator=generator).to(model.device)
    for _ in range(2):
        times = _Times()
        model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            cache_implementation="static",
            pad_token_id=0,
            streamer=times,
        )
    forget_compiled(model)
    # The prompt is put first, and the first token comes with the prompt's own pass.
    steps = [later - earlier for earlier, later in zip(times.at[1:], times.at[2:], strict=False)]
    return statistics.median(steps)


def forget_compiled(model: PreTrainedModel) -> None:
    """Drops compiled code of torch, and the compiled call that transformers keeps in the model."""
    vars(model).pop("_compiled_call", None)
    torch._dynamo.reset()
