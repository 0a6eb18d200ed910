"""Workers rehearse the next step while one is trained, and the run is that of the synchronous loop."""

from typing import Any

import pytest

from tests.models import build_float64
from tests.rl.runs import sampling_loop
from tests.runtime.in_process import TestActors
from tests.runtime.runs import Lopsided, TinyRecipe, pipeline
from tests.runtime.test_pipeline import Result, assert_same, rows_of, run, stale
from treering import metrics
from treering.engine.protocol import EngineStats
from treering.engine.torch_engine import TorchEngine
from treering.rl.rehearsal import Rehearsal
from treering.runtime.pipeline import PipelineLoop

NUM_STEPS = 5


@pytest.fixture(scope="module")
def synchronous() -> Result:
    return run(sampling_loop(build_float64("llama"), rehearse="off"), NUM_STEPS)


NAMES = {metrics.REHEARSED, metrics.REHEARSAL_KEPT, metrics.REHEARSAL_SAVED_S}


def run_counted(loop: PipelineLoop) -> tuple[Result, list[EngineStats]]:
    rows, stats = [], []
    for _ in range(NUM_STEPS):
        report = loop.step()
        has_rehearsals = report.engine.num_rehearsed + report.engine.num_verified > 0
        assert NAMES & report.values().keys() == (NAMES if has_rehearsals else set())
        stats.append(report.engine)
        rows.append(rows_of(loop))
    return ({name: tensor.clone() for name, tensor in loop.model.state_dict().items()}, rows), stats


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_run_with_rehearsals_has_the_weights_of_the_synchronous_loop(synchronous: Result, num_workers: int) -> None:
    with pipeline(num_steps=NUM_STEPS, num_workers=num_workers, rehearse="on") as loop:
        result, stats = run_counted(loop)
    assert_same(result, synchronous)
    # Rehearsals of a step's training are counted in the next step, which draws their tokens again.
    assert sum(each.num_rehearsed for each in stats) > 0
    assert sum(each.num_kept for each in stats) > 0
    tokens = [sum(len(row[2]) - _num_prompt_tokens(row) for row in rows) for rows in result[1]]
    assert [each.num_sampled for each in stats] == tokens


def _num_prompt_tokens(row: Any) -> int:
    (prompt,) = (prompt for prompt in TinyRecipe().make_task().prompts if prompt.prompt_id == row[0])
    return int(prompt.tokens.size)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_log_holds_what_workers_kept_of_each_rollout(monkeypatch: pytest.MonkeyPatch, num_workers: int) -> None:
    end, early = Rehearsal.end, dict[Any, list[int]]()

    def end_seen(self: Rehearsal, engine: Any) -> None:
        end(self, engine)
        early.update({key: tokens.tolist() for key, tokens in self.tokens.items()})

    monkeypatch.setattr(Rehearsal, "end", end_seen)
    num_logged = 0
    with pipeline(num_steps=NUM_STEPS, num_workers=num_workers, rehearse="on") as loop:
        for _ in range(NUM_STEPS):
            loop.step()
            for each in loop.latest:
                tokens = early.get((each.task_id, each.epoch, each.trial))
                # Another worker may have sampled the rollout, which then lost its rehearsal.
                assert each.rehearsed is not None or tokens is None or num_workers > 1
                if each.rehearsed is None:
                    continue
                assert each.tokens is not None
                assert each.loss_mask is not None
                response = each.tokens[each.loss_mask].tolist()
                assert tokens is not None
                same = [early_one == token for early_one, token in zip(tokens, response, strict=False)]
                assert each.rehearsed == (len(tokens), [*same, False].index(False))
                num_logged += 1
    assert num_logged > 0


def test_stolen_requests_lose_their_rehearsals_and_no_token(synchronous: Result) -> None:
    with pipeline(num_steps=NUM_STEPS, policy=Lopsided("queued"), rehearse="on") as loop:
        assert_same(run(loop, NUM_STEPS), synchronous)
        assert loop.account.stolen > 0


def test_at_a_staleness_workers_rehearse_the_step_that_comes_next() -> None:
    with pipeline(num_steps=NUM_STEPS, staleness=1, rehearse="on") as loop:
        result, stats = run_counted(loop)
        assert_same(result, stale(TinyRecipe(), loop._spec.options, NUM_STEPS, 1))
    assert sum(each.num_kept for each in stats) > 0


def test_workers_killed_while_they_rehearse_cost_no_token(synchronous: Result) -> None:
    actors = TestActors()
    with pipeline(num_steps=NUM_STEPS, num_workers=1, rehearse="on", actors=actors) as loop:
        rows = []
        for _ in range(NUM_STEPS):
            loop.step()
            rows.append(rows_of(loop))
            for kind, actor in actors.started:
                if kind == "rollout_worker":
                    actor.kill()
        assert_same(({name: each.clone() for name, each in loop.model.state_dict().items()}, rows), synchronous)
        assert loop.account.worker_deaths > 0


def test_wrong_rehearsals_cost_no_token(synchronous: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    end = Rehearsal.end

    def end_wrong(self: Rehearsal, engine: Any) -> None:
        end(self, engine)
        self.tokens = {key: (tokens + 1) % 7 for key, tokens in self.tokens.items()}

    monkeypatch.setattr(Rehearsal, "end", end_wrong)
    with pipeline(num_steps=NUM_STEPS, num_workers=1, rehearse="on") as loop:
        assert_same(run(loop, NUM_STEPS), synchronous)


@pytest.mark.parametrize("row_price", [1.0, 0.4])
def test_where_a_row_takes_time_rehearsals_begin_once_no_rollout_runs(
    monkeypatch: pytest.MonkeyPatch, row_price: float
) -> None:
    begin, num_running = Rehearsal.begin, []

    def begin_counted(self: Rehearsal, engine: Any, requests: Any) -> None:
        num_running.append(engine.num_unfinished)
        begin(self, engine, requests)

    monkeypatch.setattr(Rehearsal, "begin", begin_counted)
    monkeypatch.setattr(TorchEngine, "row_price", row_price)
    with pipeline(num_steps=NUM_STEPS, num_workers=1, rehearse="on") as loop:
        run(loop, NUM_STEPS)
    assert num_running
    assert any(num_running) is (row_price < 1.0)


def test_off_and_a_cpu_with_auto_rehearse_nothing() -> None:
    for mode in ("off", "auto"):
        with pipeline(num_steps=2, num_workers=1, rehearse=mode) as loop:
            assert loop.step().engine.num_rehearsed == loop.step().engine.num_rehearsed == 0
