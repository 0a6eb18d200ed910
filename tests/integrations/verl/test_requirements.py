"""What the tree engine refuses, with the setting of verl to write."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from treering.errors import UnsupportedError
from treering.integrations.verl.verl_settings import check_batch, check_rows, check_settings

MODEL = {"hf_config": SimpleNamespace(), "tiled_mlp": {"enabled": False, "num_shards": 4}}
ENGINE = {"strategy": "fsdp2", "ulysses_sequence_parallel_size": 1, "qat": SimpleNamespace(enable=False)}


def settings(**changes: Any) -> tuple[SimpleNamespace, SimpleNamespace]:
    model, engine = dict(MODEL), dict(ENGINE)
    for name, value in changes.items():
        (engine if name in ("strategy", "ulysses_sequence_parallel_size", "pad_to_length", "qat") else model)[name] = (
            value
        )
    return SimpleNamespace(**model), SimpleNamespace(**engine)


def test_a_text_model_under_fsdp2_is_taken() -> None:
    check_settings(*settings())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "fsdp"}, "set actor_rollout_ref.actor.strategy=fsdp2"),
        ({"strategy": "megatron"}, "actor.strategy=megatron does not allow"),
        ({"ulysses_sequence_parallel_size": 2}, r"ulysses_sequence_parallel_size=2\) cuts sequences .* set it to 1"),
        ({"use_fused_kernels": True}, "model.use_fused_kernels is on: .*; set it to False"),
        ({"use_liger": True}, "model.use_liger is on: .*; set it to False"),
        ({"tiled_mlp": {"enabled": True}}, "model.tiled_mlp is on"),
        ({"mtp": SimpleNamespace(enable=True)}, "model.mtp is on"),
        ({"pad_to_length": True}, "actor.fsdp_config.pad_to_length is on"),
        ({"qat": SimpleNamespace(enable=True)}, "qat is on"),
        ({"hf_config": SimpleNamespace(vision_config={})}, "takes images or audio"),
    ],
)
def test_what_would_not_be_exact_is_refused_before_a_model_is_loaded(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check_settings(*settings(**changes))


def loss(**config: Any) -> Any:
    given = {"policy_loss": {"loss_mode": "vanilla"}, "loss_agg_mode": "token-mean", "loss_scale_factor": None}
    return partial(print, config=SimpleNamespace(**{**given, **config}))


ALONE = {"global_batch_size": None}


@pytest.mark.parametrize(
    ("options", "loss_function", "message"),
    [
        ({"calculate_sum_pi_squared": True}, None, "support calculate_sum_pi_squared=True"),
        ({"distillation_use_topk": True}, None, "support distillation_use_topk=True"),
        ({"force_group_size": 4}, None, "use_prefix_grouper=False"),
        ({}, loss(policy_loss={"loss_mode": "clip_cov"}), "loss_mode=clip_cov averages within a micro-batch"),
        ({}, loss(loss_agg_mode="seq-mean-token-sum-norm"), "set actor_rollout_ref.actor.loss_scale_factor=N"),
        (ALONE, loss(loss_agg_mode="seq-mean-token-sum"), "=seq-mean-token-sum without global_batch_size divides"),
        (ALONE, loss(loss_agg_mode="seq-mean-token-mean"), "give the batch a global_batch_size"),
        (ALONE, loss(policy_loss={"loss_mode": "sapo"}), "=seq-mean-token-mean without global_batch_size"),
        (ALONE, loss(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=9), "without global_batch_size"),
    ],
)
def test_a_batch_or_a_loss_that_depends_on_micro_batches_is_refused(
    options: dict[str, Any], loss_function: Any, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check_batch(options, loss_function)


def test_losses_normalised_over_the_batch_are_taken() -> None:
    check_batch({"force_group_size": 1}, loss())
    check_batch({}, loss(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=512))
    check_batch({"global_batch_size": 8}, loss(loss_agg_mode="seq-mean-token-mean"))
    check_batch(ALONE, loss())
    check_batch(ALONE, None)


def test_rows_with_images_or_other_positions_are_refused() -> None:
    def nested(*rows: list[int]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    check_rows(nested([0, 1, 2], [0]), [{}, {}])
    with pytest.raises(UnsupportedError, match="position_ids must count"):
        check_rows(nested([0, 1, 2], [1, 2]), None)
    with pytest.raises(UnsupportedError, match="a row has images"):
        check_rows(nested([0]), [{"pixel_values": 1}])
