"""`use_liger_kernel`: with Liger's layers, added at the start or before, each distinct token is computed once."""

from pathlib import Path
from typing import Any

import pytest

from tests import liger
from tests.integrations.trl import runs
from tests.integrations.trl.test_exactness import GRADIENTS
from treering.errors import UnsupportedError
from treering.integrations.trl import share_prefixes

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run kernels in the interpreter, and restore what Liger changes in transformers."""
    liger.interpret(monkeypatch)
    import transformers.models.qwen3.modeling_qwen3 as code

    for name, value in vars(code).copy().items():
        monkeypatch.setattr(code, name, value)


def layers_before(model: Any) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "family", "is_before", "options"),
    [
        (runs.sft, "gpt_oss", False, {}),
        (runs.grpo, "qwen3", False, {"trainer_options": {"rollout_func": runs.episodes}}),
        (runs.dpo, "qwen3", True, {"gradient_checkpointing": True}),
    ],
    ids=["sft", "grpo episodes", "dpo"],
)
def test_gradients_are_those_of_the_stock_trainer_with_stock_layers(
    make: Any, family: str, is_before: bool, options: dict[str, Any], tmp_path: Path, interpreted: None
) -> None:
    # Kernels are slow in Triton's interpreter.
    model = runs.saved(family, **({} if family == "gpt_oss" else {"num_hidden_layers": 1}))
    stock = runs.train(make, model, tmp_path / "stock", max_steps=1, **options)
    ours = runs.train(
        make,
        model,
        tmp_path / "ours",
        shared={"group_batches": False},
        change=layers_before if is_before else None,
        max_steps=1,
        use_liger_kernel=not is_before,
        **options,
    )
    assert "LigerRMSNorm" in {module._get_name() for module in ours.trainer.model.modules()}
    assert runs.apart(ours.gradients, stock.gradients) <= GRADIENTS
    assert all(log["tree/token_ratio"] > 1 for log in ours.logs[:-1])


def test_ligers_layers_for_a_family_that_is_not_tested_with_them_are_refused(tmp_path: Path) -> None:
    trainer = runs.sft(runs.saved("mixtral"), tmp_path)
    trainer.args.use_liger_kernel = True
    with pytest.raises(UnsupportedError, match=r"'mixtral'.*set use_liger_kernel=False"):
        share_prefixes(trainer)
