"""A trainer of several ranks gives what one process gives, whichever of them dies."""

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.runtime.kills import killing
from tests.runtime.runs import TinyRecipe, pipeline
from tests.runtime.test_deaths import is_complete
from tests.runtime.test_pipeline import Result, run
from tests.runtime.test_resume import train
from treering.errors import InputError
from treering.train.loop.adapters import LoraOptions, add_lora

NUM_STEPS = 5
EXACT = 1e-12
"""Of float64 weights after steps whose sums are added up in another order."""
RANKS = "gathered"
"""Ranks have shares of other sizes, so they run passes of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters(TinyRecipe):
    """Trains adapters alone, of a model whose head is its embedding."""

    family: str = "qwen2"

    def make_model(self) -> nn.Module:
        # Not `super()`, which a class with slots does not know.
        model = TinyRecipe.make_model(self)
        torch.manual_seed(0)
        add_lora(model, LoraOptions(rank=2, alpha=4, base="tiny"))  # type: ignore[arg-type]
        return model.double()


@dataclass(frozen=True, slots=True, kw_only=True)
class OneFails(TinyRecipe):
    """Raises on the second rank alone."""

    def make_model(self) -> nn.Module:
        if dist.is_initialized() and dist.get_rank() == 1:
            raise InputError("rank 1 builds no model")
        return TinyRecipe.make_model(self)


def assert_exact(actual: Result, expected: Result) -> None:
    assert actual[1] == expected[1]
    for name, tensor in expected[0].items():
        assert (actual[0][name] - tensor).abs().max() <= EXACT, name


@pytest.fixture(scope="module")
def of_one() -> Result:
    with pipeline(num_steps=NUM_STEPS, staleness=1) as loop:
        return run(loop, NUM_STEPS)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_give_the_rollouts_and_weights_of_one_process(of_one: Result, num_ranks: int) -> None:
    with pipeline(num_steps=NUM_STEPS, staleness=1, num_trainer_ranks=num_ranks, ranks=RANKS) as loop:
        assert_exact(run(loop, NUM_STEPS), of_one)
        assert [name for name in loop.pids if name.startswith("trainer")] == [
            "trainer",
            *(f"trainer rank {rank}" for rank in range(1, num_ranks)),
        ]


def test_ranks_publish_adapters_alone_and_train_them_as_one_process_does() -> None:
    results = []
    for num_ranks in (1, 2):
        with pipeline(Adapters(), num_steps=3, num_trainer_ranks=num_ranks, ranks=RANKS) as loop:
            results.append(run(loop, 3))
    assert_exact(results[1], results[0])


def test_any_rank_may_die(of_one: Result) -> None:
    with (
        killing({9: "trainer", 30: "trainer rank 1"}) as dead,
        pipeline(num_steps=NUM_STEPS, staleness=1, num_trainer_ranks=2, ranks=RANKS) as loop,
    ):
        result = run(loop, NUM_STEPS)
        account = loop.account
    assert dead == ["trainer", "trainer rank 1"]
    assert_exact(result, of_one)
    assert is_complete(account, account.scheduled)
    assert (account.worker_deaths, account.reward_worker_deaths, account.trainer_deaths) == (0, 0, 2)


@pytest.mark.slow
def test_a_rank_that_hangs_is_replaced(of_one: Result) -> None:
    stopping = killing({5: "trainer rank 1"}, signal.SIGSTOP)
    with (
        stopping as hung,
        pipeline(num_steps=NUM_STEPS, staleness=1, num_trainer_ranks=2, ranks=RANKS, worker_time_limit_s=20.0) as loop,
    ):
        result = run(loop, NUM_STEPS)
        account = loop.account
    assert hung == ["trainer rank 1"]
    assert_exact(result, of_one)
    assert is_complete(account, account.scheduled)
    assert account.trainer_deaths >= 1


def test_a_run_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    with pipeline(num_steps=6, staleness=1) as whole:
        expected = train(whole, tmp_path / "whole")
    rows = []
    for num_ranks, stop_after in ((2, 2), (3, 4), (1, None)):
        with pipeline(num_steps=6, staleness=1, num_trainer_ranks=num_ranks, ranks=RANKS) as loop:
            rows += train(loop, tmp_path / "mixed", stop_after=stop_after)
    assert rows == expected
    for name, tensor in whole.model.state_dict().items():
        assert (loop.model.state_dict()[name] - tensor).abs().max() <= EXACT, name


def test_an_error_of_one_rank_ends_the_run_with_its_text() -> None:
    loop = pipeline(OneFails(), num_steps=1, num_trainer_ranks=2, ranks=RANKS)
    with loop, pytest.raises(InputError, match="rank 1 builds no model"):
        loop.step()
