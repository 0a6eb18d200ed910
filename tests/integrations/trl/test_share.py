"""`share_prefixes`: what it refuses, what it does not touch, and how it is undone."""

import math
import random
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.integrations.trl import runs
from treering.errors import StateError, UnsupportedError
from treering.integrations.trl import share_prefixes
from treering.integrations.trl.verification import FirstMicroBatch
from treering.model.patch import TreePatch

pytestmark = pytest.mark.filterwarnings("default")


def lora(dropout: float) -> dict[str, Any]:
    from peft import LoraConfig

    return {"peft_config": LoraConfig(**{**runs.LORA, "lora_dropout": dropout}, task_type="CAUSAL_LM")}


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"trainer_options": lora(0.05)}, r"lora_dropout=0 in LoraConfig \(--lora_dropout 0"),
        ({"model_init_kwargs": {"attention_dropout": 0.1}}, "load the model with attention_dropout=0.0"),
        ({"neftune_noise_alpha": 5.0}, "remove neftune_noise_alpha"),
    ],
)
def test_what_would_not_be_exact_is_refused_before_training(options: Any, rule: str, tmp_path: Path) -> None:
    trainer = runs.sft(runs.saved(), tmp_path, **options)
    with pytest.raises(UnsupportedError, match=rule):
        share_prefixes(trainer)
    assert "compute_loss" not in trainer.__dict__
    assert not hasattr(trainer, "_treering_shared_prefixes")


@pytest.mark.parametrize(
    ("make", "options", "rule"),
    [
        (runs.sft, {"torch_compile": True}, "set torch_compile=False, or use stage 2"),
        (runs.distillation, {}, "only its teacher's decoder.*use stage 2"),
        (
            runs.sft,
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            "use_reentrant.*verify_first=False",
        ),
        (runs.sft, {"model": {"family": "qwen3_moe"}}, "trains experts.*verify_first=False"),
    ],
)
def test_what_deepspeed_cannot_do_on_trees_is_refused_by_name(
    make: Any, options: Any, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(runs.saved(**options.pop("model", {})), tmp_path, **options)
    trainer.is_deepspeed_enabled = True
    monkeypatch.setattr(type(trainer.accelerator.state), "deepspeed_plugin", SimpleNamespace(zero_stage=3))
    with pytest.raises(UnsupportedError, match=rule):
        share_prefixes(trainer)


@pytest.mark.parametrize("setting", ["mixed_precision='fp8'", "load_in_8bit=True"])
def test_numbers_that_are_scaled_by_a_whole_batch_are_refused(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = runs.sft(runs.saved(), tmp_path)
    if "fp8" in setting:
        monkeypatch.setattr(type(trainer.accelerator), "mixed_precision", "fp8")
    else:
        trainer.model.is_loaded_in_8bit = True
    with pytest.raises(UnsupportedError, match=f"has {setting}, which scales"):
        share_prefixes(trainer)


def test_fsdp_of_the_first_version_is_refused_and_the_second_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = runs.sft(runs.saved(), tmp_path)
    trainer.is_fsdp_enabled = True
    monkeypatch.setitem(trainer.accelerator.state._shared_state, "fsdp_plugin", SimpleNamespace(fsdp_version=1))
    with pytest.raises(UnsupportedError, match=r"FSDP1, .*fsdp_version: 2 in Accelerate's configuration"):
        share_prefixes(trainer)


def test_a_wrapped_model_is_refused_with_the_advice_that_works(tmp_path: Path) -> None:
    trainer = runs.sft(runs.saved(), tmp_path)
    trainer.model = nn.DataParallel(trainer.model)
    with pytest.raises(StateError, match=r"before trainer.train\(\), .*never pass the module inside"):
        share_prefixes(trainer)


def test_another_trainer_is_refused_by_name(tmp_path: Path) -> None:
    class RewardTrainer:
        pass

    with pytest.raises(UnsupportedError, match=r"got RewardTrainer; .*treering.patch\(model\)"):
        share_prefixes(RewardTrainer())


def test_a_trainer_shares_once_and_undo_restores_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = runs.dpo(runs.saved(), tmp_path)
    before = dict(trainer.__dict__)
    forwards = trainer.model.forward, trainer.ref_model.forward
    handle = share_prefixes(trainer)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("treering:")]
    assert len(printed) == 1
    assert "DPOTrainer shares prefixes of its policy and reference on backend segments" in printed[0]
    assert "rows of a task stay together; bound" in printed[0]
    assert "this changes which rows an optimizer step sees" in printed[0]
    with pytest.raises(StateError, match="undo its handle"):
        share_prefixes(trainer)
    handle.undo()
    handle.undo()
    assert trainer.__dict__ == before
    assert (trainer.model.forward, trainer.ref_model.forward) == forwards


def test_evaluation_and_generation_do_not_enter_the_tree(tmp_path: Path) -> None:
    trainer = runs.grpo(runs.saved(), tmp_path, beta=0.1)
    handle = share_prefixes(trainer)
    del trainer._generate_single_turn
    trainer.evaluate(trainer.train_dataset.select(range(4)))
    trainer.model.train()
    prompt_ids = trainer._tokenize_prompts(trainer.train_dataset["prompt"][:4])[0]
    assert len(trainer._generate_single_turn(prompt_ids, None, {}, 4)[0]) == 4
    assert [patched.take_counts().num_calls for patched in handle._patches] == [0, 0]


def test_training_after_undo_under_autocast_is_the_stock_path(tmp_path: Path) -> None:
    run = runs.train(runs.sft, runs.saved(), tmp_path / "a", shared={}, bf16=True, max_steps=1)
    run.handle.undo()
    # Accelerate has wrapped the patched forward, and its wrapper stays.
    assert run.trainer.model.forward is not type(run.trainer.model).forward
    ids = torch.tensor([[3, 4, 5], [3, 4, 6]])
    run.trainer.model.train()(input_ids=ids, labels=ids, fused_lm_head=True)
    assert [patched.take_counts().num_calls for patched in run.handle._patches] == [0]


def test_verifying_the_first_micro_batch_changes_nothing(tmp_path: Path) -> None:
    verified, plain = (
        runs.train(runs.grpo, runs.saved(), tmp_path / str(on), shared={"verify_first": on}) for on in (True, False)
    )
    for ours, theirs in zip(verified.gradients, plain.gradients, strict=True):
        assert all(ours[name].equal(grad) for name, grad in theirs.items())
    assert set(runs.metrics_apart(verified.logs, plain.logs).values()) == {0.0}
    assert (verified.handle.difference is None, plain.handle.difference is None) == (False, True)


def test_verifying_leaves_random_states_metrics_and_gradients_as_they_were(tmp_path: Path) -> None:
    trainer = runs.sft(runs.saved(), tmp_path)
    handle = share_prefixes(trainer)
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    weight = next(trainer.model.parameters())
    weight.grad = torch.ones_like(weight)
    trainer._metrics["train"]["entropy"] = [1.0]
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    before = {key: deepcopy(value) for key, value in trainer._metrics.items()}
    trainer.model.train()
    compute = type(trainer).compute_loss.__get__(trainer)
    handle._first.check(compute, batch, None)
    assert torch.get_rng_state().equal(states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]
    assert trainer._metrics == before
    assert weight.grad.equal(torch.ones_like(weight))
    assert all(p.grad is None for p in list(trainer.model.parameters())[1:])
    assert [patched.take_counts().num_calls for patched in handle._patches] == [0]


def test_a_wrong_tree_stops_the_run_with_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreePatch, "_batch", runs.misplaced(TreePatch._batch))
    rule = r"differ from the stock path's by \d\.\de[+-]0[01] of their norm, above \d\.\de-0\d"
    with pytest.raises(StateError, match=rule):
        runs.train(runs.grpo, runs.saved(), tmp_path, shared={})


def test_a_micro_batch_without_gradients_is_not_the_one_that_verifies(tmp_path: Path) -> None:
    trainer = runs.grpo(runs.saved(), tmp_path, max_steps=1)
    trainer.reward_funcs[0] = lambda completion_ids, **_: [0.0] * len(completion_ids)
    handle = share_prefixes(trainer)
    trainer.train()
    assert handle.difference is None


def lomo(model: nn.Module) -> None:
    """Update weights that have a gradient as lomo-optim does, by hooks on gradients and `weight.data`."""

    def step(gradient: torch.Tensor) -> torch.Tensor:
        for weight in model.parameters():
            if weight.grad is not None:
                weight.data.add_(weight.grad, alpha=-0.01)
                weight.grad = None
        return gradient

    for weight in model.parameters():
        weight.register_hook(step)


def layerwise(model: nn.Module) -> None:
    """Update each weight once it has its gradient, like GaLore and APOLLO with "layerwise" in their names."""
    for weight in model.parameters():
        own = torch.optim.SGD([weight], lr=0.01)

        def step(_: nn.Parameter, own: torch.optim.SGD = own) -> None:
            own.step()
            own.zero_grad()

        weight.register_post_accumulate_grad_hook(step)


def of_torch(model: nn.Module) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.01})


def weights_apart(one: runs.Run, other: runs.Run) -> float:
    pairs = zip(one.trainer.model.parameters(), other.trainer.model.parameters(), strict=True)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


@pytest.mark.parametrize("step", [lomo, layerwise, of_torch])
def test_verifying_trains_nothing_by_an_optimizer_that_steps_in_backward(step: Any, tmp_path: Path) -> None:
    checks = []

    def count(self: Any, *args: Any, **kwargs: Any) -> None:
        checks.append(self.difference)
        stock(self, *args, **kwargs)

    stock, untrained = FirstMicroBatch._judge, runs.sft(runs.saved(), tmp_path)
    expected = runs.train(runs.sft, runs.saved(), tmp_path / "stock", change=step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FirstMicroBatch, "_judge", count)
        ours = runs.train(runs.sft, runs.saved(), tmp_path, shared={"group_batches": False}, change=step)
    assert weights_apart(ours, expected) <= 1e-6
    assert weights_apart(ours, SimpleNamespace(trainer=untrained)) > 1e-3
    assert checks == [None]
    assert ours.handle.difference.tree < 1e-5


def test_a_weight_that_verifying_would_change_stops_the_run(tmp_path: Path) -> None:
    def hidden(model: Any) -> None:
        weight = model.lm_head.weight
        node = weight.view_as(weight).grad_fn.next_functions[0][0]

        def step(*_: Any) -> None:
            weight.data.add_(1e-3)

        node.register_hook(step)
        model.node = node

    with pytest.raises(StateError, match=r"changed the weight '.*weight'.*verify_first=False"):
        runs.train(runs.sft, runs.saved(), tmp_path, shared={}, change=hidden)


def test_reentrant_recomputing_under_an_optimizer_in_backward_is_refused(tmp_path: Path) -> None:
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(UnsupportedError, match=r"under an optimizer in backward.*verify_first=False"):
        runs.train(runs.sft, runs.saved(), tmp_path, shared={}, change=of_torch, **options)


def averaging(model: Any) -> None:
    """Let each token read a part of its batch's mean."""
    mlp = model.model.layers[0].mlp
    mlp.register_forward_hook(lambda module, args, output: output + 0.3 * output.mean((0, 1), keepdim=True))


def noisy(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.register_forward_hook(lambda module, args, output: output * (1 + 0.05 * torch.randn_like(output)))


@pytest.mark.parametrize("change", [averaging, noisy])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_rounding_is_too_large_to_judge_by_nothing_is_judged(
    change: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    def changed(model: nn.Module) -> None:
        change(model.to(dtype))

    with pytest.raises(StateError, match=r"moves the first .* by \d\.\de-0[123] .*, above 1\.2e-04.*averages over its"):
        runs.train(runs.sft, runs.saved(), tmp_path, shared={}, change=changed)


@pytest.mark.parametrize("make", [runs.sft, runs.grpo, runs.kto])
def test_float64_is_as_exact_as_its_norms_in_float32(make: Any, tmp_path: Path) -> None:
    def change(model: nn.Module) -> None:
        model.double()

    stock = runs.train(make, runs.saved(), tmp_path / "stock", change=change)
    ours = runs.train(make, runs.saved(), tmp_path, shared={"group_batches": False}, change=change)
    assert runs.apart(ours.gradients, stock.gradients) <= 1e-6
    assert ours.handle.difference.tree < ours.handle.difference.bound


@pytest.mark.parametrize("tree", [math.nan, math.inf])
def test_gradients_on_trees_that_are_no_numbers_do_not_pass(tree: float, tmp_path: Path) -> None:
    trainer = runs.sft(runs.saved(), tmp_path)
    with pytest.raises(StateError, match="above"):
        FirstMicroBatch(trainer, [])._judge(1.0, tree, 1e-14, 1e-7, is_sharded=False)
    first = FirstMicroBatch(trainer, [])
    first._judge(math.nan, 0.0, 0.0, 1e-7, is_sharded=False)
    assert first.difference is None
