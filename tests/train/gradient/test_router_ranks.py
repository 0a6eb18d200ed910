"""Router losses over ranks sum to those of one flat batch, and sharded ranks run equally many forwards."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models import assert_gradients_equal, take_gradients
from tests.partitions import forced
from tests.train.flat import Batch, flat_loss
from tests.train.gradient.flat_routers import flat_router_terms
from tests.train.gradient.test_router_losses import BATCH, EXACT, LARGEST, LOSSES, MODEL
from treering.config.steps import RouterLosses
from treering.objectives import sft
from treering.ranks.group import RankGroup
from treering.ranks.setup import RanksMode, StepRanks
from treering.train import step as module
from treering.train.step import BackwardResult, backward
from treering.tree.forest import Forest


class ThreadGroup(RankGroup):
    """Rank that is a thread; its `process_group` is a barrier and the facts of all ranks."""

    __slots__ = ()

    def gather(self, fact: Any) -> list[Any]:
        barrier, facts = self.process_group
        facts[self.rank] = fact
        barrier.wait()
        everything = list(facts)
        barrier.wait()
        return everything

    def sum(self, values: np.ndarray) -> np.ndarray:
        total: np.ndarray = np.sum(self.gather(values.copy()), 0)
        return total

    def begin_sum(self, bucket: list[Tensor]) -> Callable[[], None]:
        for tensor in bucket:
            tensor.copy_(sum(self.gather(tensor.clone())))  # type: ignore[arg-type]
        return lambda: None


@pytest.mark.parametrize("losses", [LOSSES, RouterLosses(z=0.4)], ids=["balance and z", "z"])
@pytest.mark.parametrize(("max_tokens", "mode"), [(None, "gathered"), (12, "gathered"), (LARGEST, "sharded")])
def test_ranks_add_up_to_one_flat_batch_and_keep_step(
    max_tokens: int | None, mode: RanksMode, losses: RouterLosses, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One rank has several trees, one a single forward, one nothing.
    groups = [BATCH.groups[:2], [BATCH.groups[2]], []]
    masks = [BATCH.masks[:10], BATCH.masks[10:13], []]
    whole = Batch(groups=BATCH.groups[:3], masks=BATCH.masks[:13], advantages=[0.0] * 13, old_logprobs=BATCH.masks[:13])
    balance, z = flat_router_terms(MODEL, whole.sequences)
    expected = (
        flat_loss(MODEL, whole, kind="sft", normalizer="token_mean")
        + (losses.balance or 0.0) * balance
        + (losses.z or 0.0) * z
    )
    expected.backward()  # type: ignore[no-untyped-call]
    gradients = take_gradients(MODEL)
    models, shared = [copy.deepcopy(MODEL) for _ in groups], (threading.Barrier(3, timeout=500), [None] * 3)
    passes: list[list[bool]] = [[] for _ in groups]

    def ranks_of(model: object, requested: object) -> StepRanks:
        rank = next(i for i, own in enumerate(models) if own is model)
        return StepRanks(rank_group=ThreadGroup(rank=rank, size=3, process_group=shared), mode=mode)

    def step(rank: int) -> BackwardResult:
        models[rank].model.register_forward_pre_hook(lambda *_: passes[rank].append(torch.is_grad_enabled()))
        forests = [Forest.from_sequences(group) for group in groups[rank]]
        return backward(models[rank], forests, sft(masks[rank]), max_tokens, router_losses=losses)

    monkeypatch.setattr(module, "ranks_of", ranks_of)
    # Skip measuring memory, which takes extra forwards.
    with forced("keep"), ThreadPoolExecutor(3) as threads:
        results = list(threads.map(step, range(3)))
    assert sum(result.loss for result in results) == pytest.approx(expected.item(), rel=EXACT)
    for result, model in zip(results, models, strict=True):
        assert result.metrics["router_balance"] == pytest.approx(balance.item(), rel=EXACT)
        assert result.metrics["router_z"] == pytest.approx(z.item(), rel=EXACT)
        assert_gradients_equal(take_gradients(model), gradients, EXACT)
    if mode == "sharded":
        assert sorted(passes[0]) == sorted(passes[1]) == sorted(passes[2])
        assert passes[0].count(False) == (passes[0].count(True) if losses.balance else 0)
        assert passes[0].count(True) > 1
