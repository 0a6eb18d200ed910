"""Router losses over ranks: they sum to those of one flat batch, and sharded ranks run equally many forwards."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import assert_gradients_equal, take_gradients
from tests.train.flat import Batch, flat_loss
from tests.train.gradient.flat_routers import flat_router_terms
from tests.train.gradient.test_router_losses import BATCH, EXACT, LOSSES, MODEL
from treering.train.gradient.backward import backward
from treering.train.gradient.router_losses import RouterLosses
from treering.train.loss_weights import SumOverRanks
from treering.train.objectives import sft
from treering.tree.forest import Forest


class Ranks:
    """Ranks as threads, with a sum that all of them must call."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=500)
        self._own: list[Any] = [None] * count

    def sum_of(self, rank: int) -> SumOverRanks:
        def summed(values: np.ndarray) -> np.ndarray:
            self._own[rank] = values.copy()
            self._barrier.wait()
            total: np.ndarray = np.sum(self._own, 0)
            self._barrier.wait()
            return total

        return summed

    def run(self, step: Callable[[int], None]) -> None:
        errors: list[BaseException] = []

        def guarded(rank: int) -> None:
            try:
                step(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(len(self._own))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


@pytest.mark.parametrize("losses", [LOSSES, RouterLosses(z=0.4)], ids=["balance and z", "z"])
@pytest.mark.parametrize(("max_tokens", "min_micro_batches"), [(None, 0), (12, 0), (60, 9)])
def test_ranks_add_up_to_one_flat_batch_and_keep_step(
    max_tokens: int | None, min_micro_batches: int, losses: RouterLosses
) -> None:
    # One rank has several trees, one has a single forward, one has nothing to do.
    groups = [[BATCH.groups[0], BATCH.groups[1]], [BATCH.groups[2]], []]
    masks = [BATCH.masks[:10], BATCH.masks[10:13], []]
    whole = Batch(groups=BATCH.groups[:3], masks=BATCH.masks[:13], advantages=[0.0] * 13, old_logprobs=[])
    balance, z = flat_router_terms(MODEL, whole.sequences)
    whole = Batch(groups=whole.groups, masks=whole.masks, advantages=whole.advantages, old_logprobs=whole.masks)
    expected = flat_loss(MODEL, whole, kind="sft", normalizer="token_mean") + losses.balance * balance + losses.z * z
    expected.backward()  # type: ignore[no-untyped-call]
    gradients = take_gradients(MODEL)
    models, ranks = [copy.deepcopy(MODEL) for _ in groups], Ranks(3)
    results: list[Any] = [None] * 3
    passes = [[0, 0] for _ in groups]

    def step(rank: int) -> None:
        models[rank].model.register_forward_pre_hook(lambda *_: count(passes[rank]))
        results[rank] = backward(
            models[rank],
            [Forest.from_sequences(group) for group in groups[rank]],
            sft(masks[rank]),
            max_tokens,
            # "auto" would run extra forwards to measure memory.
            parents="keep",
            min_micro_batches=min_micro_batches,
            sum_over_ranks=ranks.sum_of(rank),
            router_losses=losses,
        )

    ranks.run(step)
    assert sum(result.loss for result in results) == pytest.approx(expected.item(), rel=EXACT)
    for result in results:
        assert result.metrics["router_balance"] == pytest.approx(balance.item(), rel=EXACT)
        assert result.metrics["router_z"] == pytest.approx(z.item(), rel=EXACT)
    each = [take_gradients(model) for model in models]
    assert_gradients_equal({name: sum(g[name] for g in each) for name in gradients}, gradients, EXACT)  # type: ignore[misc]
    if min_micro_batches:
        assert passes[0] == passes[1] == passes[2] == [9 if losses.balance else 0, 9]


def count(passes: list[int]) -> None:
    passes[int(torch.is_grad_enabled())] += 1
