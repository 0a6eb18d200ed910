"""Router losses of models that have both recurrent layers and experts."""

import pytest

from tests.forests import SHAPES
from tests.hybrids import build_wide, no_float32
from tests.partitions import random_partitions
from tests.train.gradient.test_backward import batch_of
from tests.train.gradient.test_partitioned import cut_by
from tests.train.gradient.test_router_losses import assert_routed_step_is_exact

BATCH = batch_of([SHAPES["bushy"][:4], SHAPES["duplicates"], [[3]]])


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_hybrids_with_experts_are_exact(family: str) -> None:
    model = build_wide(family)
    with no_float32():
        assert_routed_step_is_exact(model, BATCH)
        cut = cut_by(lambda tree: random_partitions(tree, 1, 20, cut=0.05))
        assert_routed_step_is_exact(model, BATCH, within=cut)
