"""Correct how vLLM's CPU build samples with drafts (vllm #55005), for tests only.

`expand_batch_to_tokens` returns uninitialised memory there, so that temperature, top-k and top-p are garbage.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


def expand_batch_to_tokens(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Any:
    """Repeat each row's value for each of its tokens."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = x.where(x != replace_from, x.new_tensor(replace_to)) if replace_from != replace_to else x
    return values.repeat_interleave(counts, output_size=num_tokens)


@contextmanager
def right_sampling() -> Iterator[None]:
    """Correct the sampling of this process's engines."""
    with mock.patch("vllm.v1.sample.rejection_sampler.expand_batch_to_tokens", expand_batch_to_tokens):
        yield


def register() -> None:
    """Correct the sampling as a vLLM plugin, for an engine in its own processes."""
    import vllm.v1.sample.rejection_sampler as sampler

    sampler.expand_batch_to_tokens = expand_batch_to_tokens
