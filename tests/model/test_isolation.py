"""Law 3: a changed token changes no output that does not descend from it: bitwise, with experts within rounding."""

import numpy as np
import pytest
import torch

from tests.backends import EXACT_BACKENDS
from tests.forests import SHAPES
from tests.models import EXPERTS, FAMILIES, build, build_float64
from treering.model.forward import forward
from treering.tree.forest import Forest


def with_token(forest: Forest, at: int, token: int) -> Forest:
    """The same shape with another token: the forest keeps its arrays, so outputs are comparable bit by bit."""
    tokens = forest.tokens.copy()
    tokens[at] = token
    names = ("parent", "position", "subtree_end", "branch_end", "segment_start", "segment_parent")
    return Forest(tokens=tokens, **{name: getattr(forest, name) for name in names})


DENSE = [family for family in FAMILIES if family not in EXPERTS]


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("shape", ["long segments", "comb", "prefixes of each other"])
def test_a_changed_token_changes_nothing_outside_its_subtree(shape: str, family: str, backend: str) -> None:
    model = build(family).eval()
    forest = Forest.from_sequences(SHAPES[shape])
    index = np.arange(forest.num_tokens)
    with torch.no_grad():
        before = forward(model, forest, backend=backend)
        for changed in {1, forest.num_tokens // 2, forest.num_tokens - 1}:
            after = forward(model, with_token(forest, changed, 11), backend=backend)
            # A token's own log-prob is scored at its parent, so siblings share a row but not a target.
            apart = (index < changed) | (index >= forest.subtree_end[changed])
            assert torch.equal(after.logprobs[apart], before.logprobs[apart])
            assert torch.equal(after.entropy[apart], before.entropy[apart])
            inside = ~apart & (forest.parent >= 0)
            assert not torch.equal(after.logprobs[inside], before.logprobs[inside])


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("shape", ["long segments", "comb", "prefixes of each other"])
def test_mixtures_of_experts_are_isolated_within_rounding(shape: str, family: str) -> None:
    # Another token may visit another expert, whose batch then has another size, and with it another order of sums.
    model = build_float64(family).eval()
    forest = Forest.from_sequences(SHAPES[shape])
    index = np.arange(forest.num_tokens)
    with torch.no_grad():
        before = forward(model, forest)
        for changed in {1, forest.num_tokens // 2, forest.num_tokens - 1}:
            after = forward(model, with_token(forest, changed, 11))
            apart = (index < changed) | (index >= forest.subtree_end[changed])
            assert float((after.logprobs - before.logprobs)[apart].abs().max()) <= 1e-12
            assert float((after.entropy - before.entropy)[apart].abs().max()) <= 1e-12
            inside = ~apart & (forest.parent >= 0)
            assert not inside.any() or float((after.logprobs - before.logprobs)[inside].abs().max()) > 1e-6
