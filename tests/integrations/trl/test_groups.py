"""Rows of a group or task share micro-batches, in an order that the seed decides; nothing else moves."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integrations.trl import runs
from treering.errors import ConfigError
from treering.integrations.trl import share_prefixes
from treering.integrations.trl.grouping import TaskSampler, group_order, regroup
from treering.tree.forest import Forest

pytestmark = pytest.mark.filterwarnings("default")


def test_rows_of_a_group_stand_together_in_the_order_of_the_shuffle() -> None:
    prompts = np.array([[7], [5], [7], [6], [5], [7]])
    assert group_order(prompts).tolist() == [0, 2, 5, 1, 4, 3]


def test_every_value_of_a_row_moves_with_it_and_values_of_the_batch_stay() -> None:
    def batch(prompts: list[int], rows: list[int]) -> dict[str, object]:
        ids = torch.tensor(prompts)[:, None]
        return {
            "prompt_ids": ids,
            "prompt_mask": torch.ones_like(ids),
            "advantages": torch.tensor(rows, dtype=torch.float32),
            "names": [str(row) for row in rows],
            "num_items_in_batch": torch.tensor(9),
            "old": None,
        }

    first, second = regroup([batch([1, 2], [0, 1]), batch([2, 1], [2, 3])])
    assert first["advantages"].tolist() == [0.0, 3.0]
    assert second["advantages"].tolist() == [1.0, 2.0]
    assert (first["names"], second["names"]) == (["0", "3"], ["1", "2"])
    assert (first["prompt_ids"].tolist(), int(second["num_items_in_batch"]), first["old"]) == ([[1], [1]], 9, None)


def test_a_micro_batch_of_the_sampler_is_a_task_and_every_epoch_has_every_row_once() -> None:
    # Tasks of four rows each; the rows of a task begin with its number.
    tasks = [3, 1, 2, 1, 3, 2, 1, 2, 3, 3, 2, 1]
    rows = [[task, 9, i] for i, task in enumerate(tasks)]
    sampler = TaskSampler(rows, 4, seed=0, epoch=lambda: 0)
    orders = [sampler.order(epoch).tolist() for epoch in range(8)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len({tuple(order) for order in orders}) > 2
    assert orders == [TaskSampler(rows, 4, 0, lambda: 0).order(epoch).tolist() for epoch in range(8)]
    for order in orders:
        assert [len({tasks[row] for row in order[start : start + 4]}) for start in (0, 4, 8)] == [1, 1, 1]
    assert list(sampler) == orders[0]


def test_rows_are_sorted_as_numbers_and_a_short_micro_batch_is_the_last() -> None:
    sampler = TaskSampler([[70000], [300, 2], [5], [300], [1]], 3, seed=1, epoch=lambda: 0)
    assert len(sampler) == 5
    assert list(sampler) == [4, 2, 3, 1, 0]


def test_the_token_ratio_of_kept_groups_is_the_bound(tmp_path: Path) -> None:
    run = runs.train(runs.grpo, runs.saved(), tmp_path, shared={})
    scattered = runs.train(runs.grpo, runs.saved(), tmp_path / "scattered", shared={"group_batches": False})
    expected = [flat / distinct for flat, distinct in _counted(run.trainer)]
    found = [log["tree/token_ratio"] for log in run.logs[:-1]]
    # Only the last generation's rows are still held.
    assert found[-1] == pytest.approx(expected[-1], rel=1e-12)
    assert sum(found) > sum(log["tree/token_ratio"] for log in scattered.logs[:-1])
    assert run.logs[0]["tree/sharing"] == pytest.approx(1 - 1 / found[0])


@pytest.mark.parametrize(("rows", "is_named"), [(2, True), (4, False)])
def test_micro_batches_below_a_group_are_named_with_the_setting_that_shares_more(
    rows: int, is_named: bool, tmp_path: Path
) -> None:
    trainer = runs.grpo(runs.saved(), tmp_path, per_device_train_batch_size=rows, num_generations=4)
    words = share_prefixes(trainer).batching.words
    named = "with more than 2 of the 4 rollouts of a prompt in a micro-batch (per_device_train_batch_size)"
    assert (named in words) == is_named


def _counted(trainer: object) -> list[tuple[int, int]]:
    """Return tokens and distinct tokens with a forest for each group; no arrangement of micro-batches has fewer."""
    rows = [
        (tuple(prompt[mask == 1].tolist()), tuple(completion[kept == 1].tolist()))
        for batch in trainer._buffered_inputs  # type: ignore[attr-defined]
        for prompt, mask, completion, kept in zip(
            *(batch[f"{part}_{kind}"] for part in ("prompt", "completion") for kind in ("ids", "mask")), strict=True
        )
    ]
    forests = [
        Forest.from_sequences([[*p, *c] for p, c in rows if p == prompt]) for prompt in {prompt for prompt, _ in rows}
    ]
    return [(sum(f.num_branch_tokens for f in forests), sum(f.num_tokens for f in forests))]


LOSSES_OF_A_MICRO_BATCH: dict[str, dict[str, Any]] = {
    "loss_type='bnpo'": {"loss_type": "bnpo"},
    "top_entropy_quantile": {"top_entropy_quantile": 0.3},
    "the entropy bonus": {"entropy_coef": 0.05},
    "the routers' loss": {
        "router_aux_loss_coef": 0.1,
        "learning_rate": 1e-3,
        "model_init_kwargs": {"output_router_logits": True},
    },
    "the rows of an optimizer step": {"steps_per_generation": 4},
}


@pytest.mark.parametrize("options", [{"loss_type": "dapo"}, {"loss_type": "dapo", "beta": 0.1}, {"num_iterations": 2}])
def test_losses_over_the_optimizer_batch_alone_do_not_see_the_groups(options: dict[str, Any], tmp_path: Path) -> None:
    stock = runs.train(runs.grpo, runs.saved(), tmp_path / "stock", **options)
    ours = runs.train(runs.grpo, runs.saved(), tmp_path / "ours", shared={}, **options)
    assert runs.apart(ours.gradients, stock.gradients) <= 3e-6
    assert ours.handle.difference.tree < 1e-5
    assert "; this changes logged means of micro-batches (entropy, kl, clip_ratio)" in ours.handle.batching.words
    # The log names the metrics that move.
    moved = {name for name, apart in runs.metrics_apart(ours.logs, stock.logs).items() if apart > 1e-5}
    assert moved <= {"entropy", "kl"}


@pytest.mark.parametrize("name", LOSSES_OF_A_MICRO_BATCH)
def test_a_gradient_that_groups_would_change_is_that_of_stock_by_default(name: str, tmp_path: Path) -> None:
    model = runs.saved("qwen3_moe" if "routers" in name else "qwen3")
    options = LOSSES_OF_A_MICRO_BATCH[name]
    stock = runs.train(runs.grpo, model, tmp_path / "stock", **options)
    ours = runs.train(runs.grpo, model, tmp_path / "ours", shared={}, **options)
    grouped = runs.train(runs.grpo, model, tmp_path / "grouped", shared={"group_batches": True}, **options)
    assert runs.apart(ours.gradients, stock.gradients) <= 3e-6
    assert runs.apart(grouped.gradients, stock.gradients) > 1e-5
    assert f"stay scattered, as grouping changes {name}" in ours.handle.batching.words
    assert f"; this changes {name}" in grouped.handle.batching.words


def test_a_loss_of_the_user_keeps_its_rows(tmp_path: Path) -> None:
    trainer = runs.grpo(runs.saved(), tmp_path)
    trainer._compute_loss = lambda model, inputs: 0.0
    assert "grouping changes a loss of its own" in share_prefixes(trainer).batching.words


@pytest.mark.parametrize("make", [runs.sft, runs.kto])
def test_tasks_together_share_as_much_as_the_bound(make: object, tmp_path: Path) -> None:
    epoch: dict[str, object] = {"num_train_epochs": 1, "max_steps": -1, "logging_steps": 100}
    if make is runs.kto:
        epoch |= {"loss_type": "apo_zero_unpaired", "train_sampling_strategy": "random"}
    run = runs.train(make, runs.saved(), tmp_path / "ours", shared={}, **epoch)  # type: ignore[arg-type]
    scattered = runs.train(make, runs.saved(), tmp_path / "b", shared={"group_batches": False}, **epoch)  # type: ignore[arg-type]
    ratio, before = (one.logs[-1]["tree/token_ratio"] for one in (run, scattered))
    assert ratio > before
    if make is runs.sft:
        assert ratio == pytest.approx(run.handle.batching.bound, rel=1e-12)


def test_a_resumed_run_is_bitwise_the_one_that_was_not_stopped(tmp_path: Path) -> None:
    options = {"num_train_epochs": 2, "max_steps": -1, "save_strategy": "steps", "save_steps": 3}
    whole = runs.train(runs.sft, runs.saved(), tmp_path / "run", shared={}, **options)
    trainer = runs.sft(runs.saved(), tmp_path / "run", **options)
    share_prefixes(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-6"))
    assert whole.trainer.state.global_step == trainer.state.global_step == 8
    expected, found = whole.trainer.model.state_dict(), trainer.model.state_dict()
    assert all(found[name].equal(weight) for name, weight in expected.items())


def test_an_order_that_the_user_or_the_loss_needs_is_not_replaced(tmp_path: Path) -> None:
    assert "KTO's KL pairs" in share_prefixes(runs.kto(runs.saved(), tmp_path)).batching.words
    trainer = runs.sft(runs.saved(), tmp_path, train_sampling_strategy="group_by_length")
    with pytest.raises(ConfigError, match="remove one of them"):
        share_prefixes(trainer)
    share_prefixes(trainer, group_batches=False)
