import re
import runpy
from pathlib import Path

import pytest

from tests.rl.rollouts import rollout_of

RUN = Path(__file__).parents[2] / "examples" / "tree_rollouts" / "run.py"
TINY = "--steps 2 --prompts 2 --roots 2 --points 2 --branches 1 --warmup-steps 1"
LINE = re.compile(r"(step +\d+  reward .*rollouts (\d+) .* sampled (\d+) \(flat (\d+)\))  prefilled (\d+)\n")


@pytest.fixture(autouse=True)
def beside_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RUN.parent)


def lines_of(arguments: str, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, ...]]:
    runpy.run_path(str(RUN))["main"](arguments.split())
    lines = LINE.findall(capsys.readouterr().out)
    assert len(lines) == 2
    return lines


def test_tree_rollouts_take_fewer_samples_and_prefill_little(capsys: pytest.CaptureFixture[str]) -> None:
    for _, num_rollouts, num_sampled, num_flat, num_prefilled in lines_of(TINY, capsys):
        assert int(num_rollouts) == 2 * (2 + 2 * 2)
        assert int(num_sampled) < int(num_flat)
        # Flat rollouts would prefill every answer of the calculator; branches copy what they share.
        assert int(num_prefilled) < int(num_flat)


def test_solutions_are_what_the_calculator_would_have_answered() -> None:
    from sums_with_calculator import Calculator

    task = Calculator(60, seed=1)
    for prompt, solution in zip(task.prompts, task.solutions(), strict=True):
        (tokens,), (mask,) = solution.sequences, solution.loss_masks
        rollout: list[int] = []
        for token in tokens[mask].tolist():
            rollout.append(token)
            answer = task.answer(rollout_of(rollout))
            rollout += [] if answer is None else answer.tolist()
        assert tokens.tolist() == [*prompt.tokens, *rollout]
        assert task.reward(prompt, rollout_of(rollout)) == 1.0
    for text, answer in (("[17+]", "? "), ("[1999999999+1]", "? "), ("[17+5]22 [22+30]", "52 ")):
        found = task.answer(rollout_of(task.encode(text)))
        assert found is not None
        assert task.decode(found) == answer
