"""The rules that reward answers, parts that are kept, and the sums over seeds."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.real.bench import kept
from benchmarks.real.grpo import SOURCES, PhaseClock, compared, cut_rows
from benchmarks.real.hour import growth, redone
from benchmarks.real.tasks import Calculator, follows_form, forms


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [
        ("words", ["a red fish", " one two three\n"], ["fish", "", "a very red fish"]),
        ("lower", ["a trout", "trout."], ["A trout", "", "42"]),
        ("json", ['{"name": "x"}', ' {"name": 3}\n'], ['{"name": "x"', '{"kind": "x"}', '["name"]', "name"]),
    ],
)
def test_an_answer_is_worth_something_if_and_only_if_it_has_its_form(
    rule: str, right: list[str], wrong: list[str]
) -> None:
    assert [follows_form(None, text, rule, 3) for text in right] == [1.0] * len(right)
    assert [follows_form(None, text, rule, 3) for text in wrong] == [0.0] * len(wrong)


def test_prompts_of_a_seed_are_the_same_and_distinct() -> None:
    assert forms(48, 1) == forms(48, 1) != forms(48, 2)
    assert len({line["prompt"] for line in forms(48, 1)}) == 48


class Scripted:
    """Policy that plays a script and keeps its questions."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.asked = list(texts), list[Any]()

    async def chat(self, messages: Any) -> Any:
        self.asked.append(messages[-1]["content"])
        text = self.texts.pop(0)
        return SimpleNamespace(text=text, message={"role": "assistant", "content": text})


@pytest.mark.parametrize(
    ("texts", "reward"),
    [
        (["CALC: {a} + {b}", "{sum}."], 1.0),
        (["CALC: {a} + {b}", "It is {sum}"], 0.2),
        (["CALC: 1 + {b}", "{sum}"], 0.2),
        (["{sum}"], 0.0),
    ],
)
def test_the_calculator_rewards_a_right_call_and_an_answer_that_uses_it(texts: list[str], reward: float) -> None:
    task = Calculator.tasks[0]
    a, b = task.data
    policy = Scripted(*(text.format(a=a, b=b, sum=a + b) for text in texts))
    assert asyncio.run(Calculator().run(task, policy)) == reward
    assert policy.asked[1:] == ([] if len(texts) == 1 else [policy.asked[1]])
    if reward == 1.0:
        assert policy.asked[1] == f"Result: {a + b}"


def test_a_part_that_is_kept_is_not_done_again(tmp_path: Path) -> None:
    kept(tmp_path / "parts" / "a.json", lambda: [1])
    kept(tmp_path / "parts" / "a.json", lambda: pytest.fail("done again"))
    assert json.loads((tmp_path / "parts" / "a.json").read_text())["found"] == [1]


def test_rows_of_steps_that_are_done_again_are_dropped(tmp_path: Path) -> None:
    rows = [{"side": side, "step": step} for step in (1, 2, 3) for side in ("plain", "treering")]
    file = tmp_path / "steps.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cut_rows(file, {"plain": 3, "treering": 1})
    left = [(row["side"], row["step"]) for row in map(json.loads, file.read_text().splitlines())]
    assert left == [("plain", 1), ("treering", 1), ("plain", 2), ("plain", 3)]


def test_the_clock_of_a_step_hears_no_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 3.0, 3.5, 7.0, 50.0, 90.0])
    monkeypatch.setattr("time.process_time", lambda: next(times))
    loop = SimpleNamespace(on_progress=None)

    def step() -> str:
        for phase in ("sampling", "sampling", "training"):
            loop.on_progress(phase, 0, 1)
        return "report"

    loop.step = step
    clock = PhaseClock(SimpleNamespace(loop=loop))
    assert loop.step() == "report"
    # Sampling until training begins, training until the step ends.
    assert clock.seconds == {"sampling": 3.5, "training": 3.5}
    loop.on_progress("sampling", 0, 1)
    assert clock.seconds == {"sampling": 3.5, "training": 3.5}


def test_a_task_has_the_means_of_its_seeds_and_ratios_of_the_means() -> None:
    def run(seed: int, plain_s: float) -> dict[str, Any]:
        def side(seconds: float, computed: int) -> dict[str, Any]:
            times = {"sampling": 1.0, "training": seconds, "whole": seconds + 1.0}
            by_epoch = {"reward_by_epoch": [0.0, seed], "tokens_per_forward_by_epoch": [1.0, 2.0]}
            return {
                **by_epoch,
                "held_out_reward": [0.5],
                "flat_tokens": 12,
                "computed_tokens": computed,
                "processor_s": times,
                "wall_s": times,
            }

        sides = {"plain": side(plain_s, 12), "treering": side(2.0, 4)}
        sources = {source: [1.0, 1.0] for source in (*SOURCES, "all")}
        return {"task": "sums", "temperature": 1.0, "seed": seed, "sides": sides, "drafts_by_source": sources}

    [row] = compared([run(0, 4.0), run(1, 8.0)])
    assert (row["num_seeds"], row["token_ratio"]) == (2, 3.0)
    assert row["reward_by_epoch"] == {"plain": [0.0, 0.5], "treering": [0.0, 0.5]}
    assert row["processor_ratio"] == {"sampling": 1.0, "training": 3.0, "whole": pytest.approx(7 / 3)}


def test_steps_done_again_are_compared_in_all_but_times_and_memory() -> None:
    before = [{"step": step, "train/loss": float(step), "time/step_s": 1.0} for step in (1, 2, 3)]
    after = [
        {"step": step, "train/loss": float(step), "time/step_s": 2.0, "memory/peak_bytes": 3} for step in (2, 3, 4)
    ]
    assert redone(before, after, first_step=2) == {"num_steps": 2, "differing": []}
    after[1]["train/loss"] = 3.0000001
    assert redone(before, after, first_step=2)["differing"] == ["train/loss"]
    assert redone(before, after, first_step=4) == {"num_steps": 0, "differing": []}


def test_memory_that_grows_after_the_start_has_a_slope() -> None:
    # 900 MB within the first third, then 2 MB a minute: 120 MB an hour.
    memory = [(60.0 * minute, 900.0 + 2 * minute if minute >= 10 else 90.0 * minute) for minute in range(30)]
    found = growth(memory)
    assert found["highest"] == 958.0
    assert found["growth_per_hour"] == pytest.approx(120.0)
