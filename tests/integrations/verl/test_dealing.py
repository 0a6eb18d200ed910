"""What verl's trainer deals to its ranks, by its own functions: groups taken apart, and made whole."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed: make verl-test", allow_module_level=True)

from tests.integrations.verl.common import num_distinct
from treering.errors import UnsupportedError
from treering.integrations.verl.rank_shares import dealt_rows, order_rows, share_rows
from treering.tree.forest import Forest

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]

NUM_GROUPS, GROUP_SIZE = 12, 4


def rows_by_key() -> dict[str, list[int]]:
    """Rows of groups in the order in which they were done, which is not that of their groups; verl's keys."""
    random = np.random.default_rng(0)
    rows = {
        f"{group:02}_{session}_0": [1000 + group] * 40 + random.integers(0, 1000, int(random.integers(5, 60))).tolist()
        for group in range(NUM_GROUPS)
        for session in range(GROUP_SIZE)
    }
    return {key: rows[key] for key in random.permutation(list(rows))}


def dealt_by_verl(rows: dict[str, list[int]], num_ranks: int, *, balance_batch: bool) -> list[list[str]]:
    """The keys of each rank: verl's trainer balances them, and its dispatch cuts them in order."""
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    workers = SimpleNamespace(_dispatch_info={"actor": list(range(num_ranks))})
    trainer: Any = SimpleNamespace(
        actor_rollout_wg=workers,
        tokenizer=SimpleNamespace(eos_token_id=0),
        config=SimpleNamespace(trainer=SimpleNamespace(balance_batch=balance_batch)),
        _get_required_batch_multiple=lambda dp_size: dp_size,
    )
    batch = KVBatchMeta(keys=list(rows), tags=[{"seq_len": len(row)} for row in rows.values()], partition_id="train")
    # The dispatch itself asks a running TransferQueue, and then cuts in the same way.
    return [chunk.keys for chunk in PPOTrainer._balance_batch(trainer, batch, metrics={}).chunk(num_ranks)]


def num_ranks_of(group: str, ranks: list[list[str]]) -> int:
    return sum(any(key.startswith(f"{group}_") for key in keys) for keys in ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_verls_trainer_takes_groups_apart_whatever_balance_batch_says(num_ranks: int) -> None:
    balanced, unbalanced = (dealt_by_verl(rows_by_key(), num_ranks, balance_batch=on) for on in (True, False))
    assert balanced == unbalanced
    assert {len(keys) for keys in balanced} == {NUM_GROUPS * GROUP_SIZE // num_ranks}
    is_apart = [num_ranks_of(f"{group:02}", balanced) > 1 for group in range(NUM_GROUPS)]
    assert sum(is_apart) > NUM_GROUPS / 2


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_verl_has_dealt_becomes_whole_groups(num_ranks: int) -> None:
    rows = rows_by_key()
    keys = [key for own in dealt_by_verl(rows, num_ranks, balance_batch=True) for key in own]
    groups = [key.partition("_")[0] for key in keys]
    forest = Forest.from_sequences([rows[key] for key in keys])
    rank_of_row = share_rows(forest, groups, num_ranks)
    assert all(len({rank for rank, own in zip(rank_of_row, groups, strict=True) if own == g}) == 1 for g in groups)
    dealt = dealt_rows(len(keys), num_ranks)
    # Each group's prompt is computed on one rank instead of on nearly all.
    assert busiest(rows, keys, rank_of_row) < busiest(rows, keys, dealt)


def busiest(rows: dict[str, list[int]], keys: list[str], rank_of_row: Any) -> int:
    ranks = set(rank_of_row.tolist())
    return max(num_distinct([rows[keys[row]] for row in np.flatnonzero(rank_of_row == rank)]) for rank in ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_mini_batches_of_whole_groups_compute_fewer_tokens_than_those_that_verl_cuts(num_ranks: int) -> None:
    rows = rows_by_key()
    keys = [key for own in dealt_by_verl(rows, num_ranks, balance_batch=True) for key in own]
    groups = [key.partition("_")[0] for key in keys]
    num_mini_batches = 3

    def computed(rows_by_rank: Any) -> int:
        """Tokens of the busiest rank, mini-batches together, where ranks swap rows of each."""
        parts = [part.ravel() for part in np.split(rows_by_rank, num_mini_batches, axis=1)]
        num_tokens = 0
        for part in parts:
            own = [keys[row] for row in part]
            forest = Forest.from_sequences([rows[key] for key in own])
            num_tokens += busiest(rows, own, share_rows(forest, [groups[row] for row in part], num_ranks))
        return num_tokens

    whole = order_rows(groups, num_ranks, num_mini_batches)
    by_mini_batch = np.split(np.array(groups)[whole], num_mini_batches, axis=1)
    assert sum(len(set(part.ravel())) for part in by_mini_batch) == NUM_GROUPS
    assert computed(whole) < computed(np.arange(len(keys)).reshape(num_ranks, -1))


def test_shuffled_rows_are_refused_where_mini_batches_have_whole_groups() -> None:
    from verl.utils import tensordict_utils as tu

    from treering.integrations.verl.mini_batches import GroupedWorker

    data = tu.get_tensordict({}, {"dataloader_kwargs": {"shuffle": True}})
    with pytest.raises(UnsupportedError, match=r"actor.shuffle=True mixes rows.*write False"):
        GroupedWorker.train_mini_batch(SimpleNamespace(), data)
