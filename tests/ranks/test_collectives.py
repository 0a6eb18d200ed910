"""Every collective of a step is one that NCCL has, on the model's device; small facts use the host's backend."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.test_ranks import torchrun

pytestmark = pytest.mark.ranks

NUM_RANKS = 2
OF_NCCL = {"allreduce_", "_allgather_base_", "_reduce_scatter_base_"}
"""Collectives of weights and gradients that NCCL supports on CUDA.

Ranks send nothing to each other directly, and nothing is broadcast, scattered or exchanged.
"""

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder: Path = tmp_path_factory.mktemp("collectives")
    done = torchrun(NUM_RANKS, "tests.ranks.collectives", str(folder))
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def split(calls: list[Any]) -> tuple[list[Any], list[Any]]:
    """Split calls into those with weights or gradients, which are float32 here, and those with facts and small sums."""
    big = [call for call in calls if all(dtype == "torch.float32" for dtype, *_ in call[1])]
    return big, [call for call in calls if call not in big]


@pytest.mark.parametrize("mode", ["sharded", "gathered", "whole"])
def test_weights_and_gradients_are_sent_by_what_nccl_has(mode: str, found: Found) -> None:
    for rank in found:
        big, small = split(rank[mode])
        names = {name for name, _ in big}
        assert names <= OF_NCCL
        assert names == ({"allreduce_"} if mode == "whole" else OF_NCCL - {"allreduce_"})
        # Float64 sums, and pickled facts with their lengths, all on the host.
        assert {name for name, _ in small} <= {"allreduce_", "allgather_", "_allgather_base_"}
        kinds = {(dtype, device) for _, facts in small for dtype, device, _ in facts}
        assert kinds <= {("torch.float64", "cpu"), ("torch.uint8", "cpu"), ("torch.int64", "cpu")}


def test_gradients_of_whole_weights_are_summed_in_one_bucket(found: Found) -> None:
    for rank in found:
        big, _ = split(rank["whole"])
        assert rank["num_weights"] > 1
        assert len(big) == 1


@pytest.mark.parametrize("num_bytes", [1, 10_000, 10**9])
def test_sums_that_begin_in_the_last_backward_have_the_bits_of_those_of_each_weight(
    num_bytes: int, found: Found
) -> None:
    runs = [rank["overlap"][str(num_bytes)] for rank in found]
    assert all(run["same bits"] for run in runs)
    kinds = set()
    for own, other in zip(*(run["steps"] for run in runs), strict=True):
        assert own.count("sum") == other.count("sum"), "all ranks send the same buckets"
        for events in (own, other):
            kinds.add(events.count("begin"))
            first = events.index("sum")
            # Nothing is sent before the last backward begins, and everything before it ends.
            assert "begin" not in events[first:]
            assert events[first - 1 :] == ["begin", *["sum"] * events.count("sum"), "end"] or "begin" not in events
    assert 0 in kinds
    assert 1 in kinds
    assert max(kinds) > 2


@pytest.mark.parametrize(("mode", "planned"), [("sharded", (12, 12)), ("gathered", (7, 7)), ("whole", (7, 7))])
def test_ranks_plan_by_the_fewest_tokens_that_any_has_room_for(
    mode: str, planned: tuple[int, int], found: Found
) -> None:
    tokens, errors = zip(*(rank["fewest tokens"][mode] for rank in found), strict=True)
    # Trees of 12 tokens, which sharded ranks never cut.
    assert tokens == planned
    assert max(errors) <= 1e-5


def test_small_sums_and_facts_take_the_host(found: Found) -> None:
    for rank in found:
        assert {device for _, facts in rank["facts"] for _, device, _ in facts} == {"cpu"}


@pytest.mark.parametrize("mode", ["sharded", "gathered"])
def test_a_sharded_head_computes_logits_once_with_the_gradients_of_one_process(mode: str, found: Found) -> None:
    assert all(rank["three passes"][mode] <= 1e-5 for rank in found)


@pytest.mark.parametrize("run", ["autocast", "16 bits"])
def test_a_run_in_bfloat16_gathers_16_bits_and_sums_gradients_in_32(run: str, found: Found) -> None:
    sent = {(name, facts[0][0]) for name, facts in found[0][run]}
    assert ("_reduce_scatter_base_", "torch.float32") in sent
    assert not {("_reduce_scatter_base_", "torch.bfloat16"), ("_allgather_base_", "torch.float32")} & sent
