"""A step that takes its loss's gradient in parts, while logits exist, equals a float64 step that scores first."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.models import assert_gradients_equal, build, build_float64, take_gradients
from tests.train.flat import Batch
from treering.model import three_pass
from treering.model.three_pass import ThreePassScores
from treering.objectives import Objective, dapo, grpo, gspo
from treering.train.step import backward
from treering.tree.forest import Forest

kernels = pytest.importorskip("treering.model.head_kernels")
pytestmark = pytest.mark.skipif(not kernels.INTERPRETED, reason="the kernels are compiled here")

BATCH = Batch(
    groups=[[[5, 6, 7, 8], [5, 6, 9, 3, 2], [5, 6, 7, 4, 4, 1]], [[3, 3, 5, 6], [3, 8]]],
    masks=[[0, 1, 1, 1], [0, 1, 0, 1, 1], [0, 0, 1, 1, 1, 1], [0, 1, 1, 0], [0, 1]],
    advantages=[1.0, -0.5, 2.0, 0.7, -1.3],
    old_logprobs=[[-3.0 - 0.2 * i for i in range(n)] for n in (4, 5, 6, 4, 2)],
)
POLICY = BATCH.advantages, BATCH.masks, BATCH.old_logprobs
OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "once": lambda: grpo(*POLICY, shared="once"),
    "entropy": lambda: dapo(*POLICY, entropy_coefficient=0.1, ref_logprobs=BATCH.old_logprobs, kl_coefficient=0.2),
    # The ratio covers a whole sequence, so partitions get its gradient with respect to every log-prob.
    "gspo": lambda: gspo(*POLICY),
}
FORESTS = [Forest.from_sequences(group) for group in BATCH.groups]


@pytest.mark.parametrize(("objective", "max_tokens"), [("once", None), ("gspo", None), ("entropy", 4), ("gspo", 4)])
def test_a_loss_on_kernels_gives_the_gradients_of_float64(
    objective: str, max_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, model = build_float64(), build()
    wanted = backward(exact, FORESTS, OBJECTIVES[objective](), max_tokens, temperature=0.8)
    takes_parts = objective != "gspo" or max_tokens is not None
    monkeypatch.setattr("treering.model.edges.has_kernels", lambda _: True)
    monkeypatch.setattr("treering.model.edges.rows_at_once", lambda *_: 2)
    score_first = ThreePassScores.backward

    def backward_of_scores(*inputs: Any) -> Any:
        assert not takes_parts, "logits are computed again"
        return score_first(*inputs)

    monkeypatch.setattr(ThreePassScores, "backward", backward_of_scores)
    # The weight gradient is used as it is, without a multiply by 1.
    starts_with_one: list[bool] = []
    is_one = three_pass._is_one
    monkeypatch.setattr(three_pass, "_is_one", lambda upstream: starts_with_one.append(is_one(upstream)) or True)
    monkeypatch.setitem(three_pass._ROWS, ("a step before",), 1)
    got = backward(model, FORESTS, OBJECTIVES[objective](), max_tokens, temperature=0.8)
    assert got.loss == pytest.approx(wanted.loss, rel=1e-5)
    assert got.metrics == pytest.approx(wanted.metrics, rel=1e-4, abs=1e-6)
    assert_gradients_equal(take_gradients(model), take_gradients(exact), 1e-5)
    assert set(starts_with_one) == ({True} if takes_parts else set())
    assert not three_pass._ROWS, "chunks may grow again in the next step"
