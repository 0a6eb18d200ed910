"""Law 3: a changed token changes only outputs that descend from it: bitwise, or within rounding with experts."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.backends import EXACT_BACKENDS
from tests.forests import SHAPES
from tests.models import EXPERTS, FAMILIES, build, build_float64
from treering.model.forward import forward
from treering.tree.forest import Forest


def with_token(forest: Forest, at: int, token: int) -> Forest:
    """Replace one token and keep the other arrays, so that outputs are comparable bit by bit."""
    tokens = forest.tokens.copy()
    tokens[at] = token
    names = ("parent", "position", "subtree_end", "branch_end", "segment_start", "segment_parent")
    return Forest(tokens=tokens, **{name: getattr(forest, name) for name in names})


WAYS = [
    *((family, "segments", "long segments") for family in FAMILIES),
    *(("qwen3", backend, shape) for backend in EXACT_BACKENDS for shape in ("comb", "prefixes of each other")),
    ("mixtral", "segments", "comb"),
]


def assert_isolated(model: nn.Module, forest: Forest, tolerance: float = 0.0, backend: str = "auto") -> None:
    """Change some tokens, one at a time."""
    index = np.arange(forest.num_tokens)
    with torch.no_grad():
        before = forward(model, forest, backend=backend)
        for changed in {1, forest.num_tokens // 2, forest.num_tokens - 1}:
            after = forward(model, with_token(forest, changed, 11), backend=backend)
            # A token's own log-prob is scored at its parent, so siblings share a row but not a target.
            apart = (index < changed) | (index >= forest.subtree_end[changed])
            for found, wanted in ((after.logprobs, before.logprobs), (after.entropy, before.entropy)):
                assert float((found - wanted)[apart].abs().max()) <= tolerance
            inside = ~apart & (forest.parent >= 0)
            assert float((after.logprobs - before.logprobs)[inside].abs().max()) > 1e-6


@pytest.mark.parametrize(("family", "backend", "shape"), WAYS)
def test_a_changed_token_changes_nothing_outside_its_subtree(family: str, backend: str, shape: str) -> None:
    # Another token may visit another expert, which changes the size of expert batches and the order of their sums.
    model = (build_float64 if family in EXPERTS else build)(family).eval()
    forest = Forest.from_sequences(SHAPES[shape])
    assert_isolated(model, forest, 1e-12 if family in EXPERTS else 0.0, backend)
