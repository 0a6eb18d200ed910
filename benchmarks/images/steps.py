"""One step of each way: the gradient of the mean negative log-probability of the completions, for every weight."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.common.timing import Step
from benchmarks.images.cases import Case, forest_of, stock_inputs
from treering.objectives import sft
from treering.train.step import backward


def padded_batch(model: nn.Module, case: Case) -> Step:
    """What a careful user runs: no padding is needed, and the head runs only on rows with loss."""
    device = next(model.parameters()).device
    inputs, num = {name: each.to(device) for name, each in stock_inputs(case).items()}, case.completion_tokens

    def step() -> None:
        logits = model(**inputs, logits_to_keep=num + 1, use_cache=False).logits[:, :-1]
        torch.autograd.backward(F.cross_entropy(logits.flatten(0, 1), inputs["input_ids"][:, -num:].flatten()))

    return step


def tree(model: nn.Module, case: Case) -> Step:
    """Treering's."""
    forest = forest_of(case)
    masks = [np.arange(length) >= length - case.completion_tokens for length in forest.branch_length.tolist()]

    def step() -> None:
        backward(model, forest, sft(masks))

    return step


WAYS: Mapping[str, Callable[[nn.Module, Case], Step]] = MappingProxyType({"padded_batch": padded_batch, "tree": tree})
"""What makes the step of each way, which adds to a model's gradients."""
