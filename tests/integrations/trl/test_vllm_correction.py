"""With vLLM the importance correction is the stock trainer's: vLLM is scripted here, and samples off-policy."""

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.integrations.trl import runs
from tests.models import VOCAB

pytestmark = pytest.mark.filterwarnings("default")

# Rounding as for any loss, see test_exactness.
GRADIENTS = 3e-6
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
CASES: dict[str, dict[str, Any]] = {
    **{mode: {"vllm_importance_sampling_mode": mode} for mode in MODES},
    "vespo": {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
    "tool masks": {"trainer_options": {"rollout_func": lambda texts, trainer: episodes(texts, trainer)}},
}


class ScriptedVLLM:
    """Stand-in for TRL's `VLLMGeneration`: completions of `runs`, with log-probs of no real policy."""

    def __init__(self, **_: Any) -> None: ...

    def sync_weights(self) -> None: ...

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, ...]:
        completions = runs.completions(prompts)
        return prompts, completions, [[[value] for value in logprobs(ids)] for ids in completions], None


def logprobs(completion: list[int]) -> list[float]:
    """Return log-probs near those of a new model, far enough that some ratios are clipped and others are not."""
    return [0.5 * math.sin(7.0 * token + index) - math.log(VOCAB) for index, token in enumerate(completion)]


def episodes(texts: list[str], trainer: Any) -> dict[str, Any]:
    found = runs.episodes(texts, trainer)
    return found | {"logprobs": [logprobs(ids) for ids in found["completion_ids"]]}


def grpo(model: str, out: Path, **options: Any) -> Any:
    plain = {"use_vllm": True, "max_steps": 2, "vllm_importance_sampling_clip_max": 1.3}
    with mock.patch("trl.trainer.grpo_trainer.VLLMGeneration", ScriptedVLLM):
        made = runs.grpo(model, out, **{**plain, **options})
    del made._generate_single_turn
    return made


@pytest.mark.parametrize("name", CASES)
def test_the_corrected_loss_is_that_of_the_stock_trainer(name: str, tmp_path: Path) -> None:
    stock = runs.train(grpo, runs.saved(), tmp_path / "stock", **CASES[name])
    # Rows keep the stock trainer's order, so that each micro-batch's loss can be compared.
    shared = runs.train(grpo, runs.saved(), tmp_path / "shared", shared={"group_batches": False}, **CASES[name])
    assert runs.apart(shared.gradients, stock.gradients) < GRADIENTS
    metrics = runs.metrics_apart(shared.logs, stock.logs)
    assert metrics["loss"] < 1e-6
    assert max(metrics.values()) < 1e-5
    ratio = stock.logs[0]["sampling/importance_sampling_ratio/max"]
    assert abs(ratio - 1.0) > 0.1


def test_groups_that_stand_together_keep_their_ratios(tmp_path: Path) -> None:
    stock = runs.train(grpo, runs.saved(), tmp_path / "stock")
    shared = runs.train(grpo, runs.saved(), tmp_path / "shared", shared={})
    assert runs.apart(shared.gradients, stock.gradients) < GRADIENTS


def test_the_comparison_sees_the_correction(tmp_path: Path) -> None:
    corrected = runs.train(grpo, runs.saved(), tmp_path / "one")
    plain = runs.train(grpo, runs.saved(), tmp_path / "two", vllm_importance_sampling_correction=False)
    assert runs.apart(plain.gradients[:1], corrected.gradients[:1]) > 1e-2
