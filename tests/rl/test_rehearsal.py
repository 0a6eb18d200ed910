"""Rehearsals in a loop give the same rollouts and weights, are all kept where weights stay, and resume bit by bit."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models import build_float64
from tests.rl.runs import TinyTask, eager, sampling_loop, steps_in
from tests.rl.test_resume import rollouts_of
from treering import metrics
from treering.config.engine import Sampling
from treering.engine.protocol import Engine, EngineStats, Request, Rollout
from treering.ranks.group import RankGroup
from treering.rl.drafting import Drafting
from treering.rl.loop import RlLoop
from treering.rl.rehearsal import Rehearsal, kept_share, with_rehearsed
from treering.rl.step_report import RlStepReport

NUM_STEPS = 5
"""Two epochs of three steps, so that prompts come again, with another draw."""


def loop_of(memory: Drafting | None = None, **changes: object) -> RlLoop:
    return sampling_loop(build_float64(), memory, **{"rehearse": "on", **changes})


def train(folder: Path, loop: RlLoop, stop_after: int | None = None) -> list[RlStepReport]:
    found = []
    for report in steps_in(folder, loop, NUM_STEPS):
        found.append(report)
        if report.step == stop_after:
            break
    return found


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("max_gen_batches", [1, 2])
def test_a_loop_samples_and_learns_as_without_rehearsals(tmp_path: Path, drafts: bool, max_gen_batches: int) -> None:
    loops = {
        mode: loop_of(eager() if drafts else None, rehearse=mode, max_gen_batches=max_gen_batches)
        for mode in ("off", "on")
    }
    reports = {mode: train(tmp_path / mode, loop) for mode, loop in loops.items()}
    assert rollouts_of(tmp_path / "on") == rollouts_of(tmp_path / "off")
    for name, weight in loops["off"].model.state_dict().items():
        torch.testing.assert_close(loops["on"].model.state_dict()[name], weight, rtol=0, atol=1e-9)
    totals = {mode: [sum(getattr(r.engine, name) for r in found) for name in NAMES] for mode, found in reports.items()}
    assert totals["off"][:3] == [0, 0, 0]
    assert min(totals["on"][:3]) > 0
    if not drafts:
        # Kept tokens needed no pass of their own.
        assert totals["on"][3] < totals["off"][3]
    assert [r.rollouts for r in reports["on"]] == [r.rollouts for r in reports["off"]]


NAMES = ("num_rehearsed", "num_verified", "num_kept", "num_forwards")


def test_weights_that_stay_keep_every_token() -> None:
    calls = []

    def reward(rollout: Rollout) -> float:
        calls.append(rollout.key)
        return 1.0

    loop = sampling_loop(task=TinyTask(reward=reward), rehearse="on")
    reports = [loop.step() for _ in range(NUM_STEPS)]
    assert all(report.update is None for report in reports)
    assert len(calls) == len(set(calls)) == sum(report.rollouts.num_rollouts for report in reports)
    for report in reports[1:]:
        assert report.engine.num_kept == report.engine.num_verified > 0
        assert report.engine.num_changed == 0
        values = report.values()
        assert values[metrics.REHEARSAL_KEPT] == 1.0
        assert values[metrics.REHEARSED] == report.engine.num_rehearsed
        assert 0 < values[metrics.REHEARSAL_SAVED_S] < values[metrics.ROLLOUT_S]
    assert metrics.REHEARSED not in sampling_loop(rehearse="off").step().values()


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_resumed_loop_ends_with_the_same_bits(tmp_path: Path, stop: int) -> None:
    whole = loop_of(eager())
    train(tmp_path / "whole", whole)
    train(tmp_path / "stopped", loop_of(eager()), stop_after=stop)
    resumed = loop_of(eager())
    reports = train(tmp_path / "stopped", resumed)
    assert reports[0].engine.num_kept > 0
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], weight)
    assert rollouts_of(tmp_path / "stopped") == rollouts_of(tmp_path / "whole")


def test_lost_rehearsals_cost_no_token(tmp_path: Path) -> None:
    whole = loop_of()
    train(tmp_path / "whole", whole)
    train(tmp_path / "stopped", loop_of(), stop_after=2)
    resumed = loop_of(rehearse="off")
    train(tmp_path / "stopped", resumed)
    assert rollouts_of(tmp_path / "stopped") == rollouts_of(tmp_path / "whole")
    for name, weight in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], weight, rtol=0, atol=1e-9)


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_a_run_that_no_longer_rehearses_keeps_no_tokens_of_its_checkpoint(tmp_path: Path, mode: str) -> None:
    train(tmp_path, loop_of(), stop_after=2)
    resumed = loop_of(rehearse=mode)
    train(tmp_path, resumed, stop_after=3)
    assert resumed.state()["rehearsal"]["tokens"] == []


def test_the_rest_after_a_change_is_a_draft_of_its_prompt() -> None:
    memory = eager()
    loop = loop_of(memory)
    loop.step()
    (key, tokens), *_ = loop._sampler.rehearsal.tokens.items()
    wrong = np.array([tokens[0], (tokens[1] + 1) % 32, 29, 30, 31, 29, 30], np.int32)
    loop._sampler.rehearsal.tokens = {key: wrong}
    loop.step()
    texts = [text.tolist() for text in memory.snapshot[key[0]].texts().values()]
    assert any("29, 30, 31, 29, 30" in json.dumps(text) for text in texts)


def test_the_kept_share_is_that_of_a_geometric_law() -> None:
    assert [round(kept_share(expected / 1000, 1000), 2) for expected in (0.1, 1, 4)] == [0.95, 0.63, 0.25]
    assert (kept_share(0.0, 50), kept_share(1.0, 4)) == (1.0, 0.25)
    changes = np.random.default_rng(0).random((20_000, 30)) < 0.05
    kept = np.where(changes.any(1), changes.argmax(1), 30)
    # The mean of the kept tokens, and of one more where one changed.
    assert kept_share(0.05, 30) == pytest.approx((kept + changes.any(1)).mean() / 30, rel=0.02)


class Priced(Engine):
    """Policy that records what it is asked to rehearse."""

    def __init__(self, price: float) -> None:
        self.price, self.asked = price, 0

    @property
    def row_price(self) -> float:
        return self.price

    def rehearse(self, requests: list[Request]) -> None:
        self.asked += len(requests)

    def take_rehearsals(self) -> dict[tuple[str, int, int], np.ndarray]:
        return {("p", 0, 0): np.arange(5000, dtype=np.int32)}


Priced.__abstractmethods__ = frozenset()


def asked(price: float, change: float, length: int, num_batches: int) -> tuple[list[int], Rehearsal]:
    """Return how many of 64 requests "auto" rehearses in each batch, if all but a share are kept."""
    gate, engine = Rehearsal("auto"), Priced(price)
    requests = [Request(prompt_id="p", prompt=[3], sampling=Sampling(), sample=i) for i in range(64)]
    found = []
    for _ in range(num_batches):
        before = engine.asked
        gate.begin(engine, requests)
        gate.end(engine)
        found.append(engine.asked - before)
        num_changed = round(1000 * change)
        stats = EngineStats(num_kept=1000 - num_changed, num_changed=num_changed) if found[-1] else EngineStats()
        gate.note(stats, [length] * 8, RankGroup())
    return found, gate


def test_auto_rehearses_where_enough_is_kept() -> None:
    assert asked(1.0, 0.0, 50, 4)[0] == [0] * 4
    assert asked(0.4, 0.0, 50, 4)[0] == [8, 64, 64, 64]
    assert asked(0.4, 0.01, 100, 4)[0] == [8, 64, 64, 64]
    # With 0.25 of 100 tokens kept, only a few are tried, once in a while.
    found, gate = asked(0.4, 0.04, 100, 40)
    assert (found[0], sum(found), max(found)) == (8, 8 * 3, 8)
    # A token after the 40th is reached with a chance below 0.2.
    assert [tokens.size for tokens in gate.tokens.values()] == [40]


def test_only_requests_that_were_rehearsed_have_tokens() -> None:
    first, second = (Request(prompt_id="p", prompt=[3], sampling=Sampling(), sample=i) for i in range(2))
    found = with_rehearsed([first, second], {first.key: np.array([4], np.int32)})
    assert [None if each.rehearsed is None else each.rehearsed.tolist() for each in found] == [[4], None]
