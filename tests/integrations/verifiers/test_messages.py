"""Errors of verifiers become one short line with the cause. Does not need verifiers."""

from collections import Counter

import pytest

from treering.errors import StateError
from treering.integrations.verifiers.worker import failure_text, in_words
from treering.rl.collect import Collected
from treering.rl.environments.collect_episodes import check_failures
from treering.rl.sampler import FailedSteps

FRAMES = "".join(f'  File "/venv/site-packages/agent/part_{i}.py", line {i}, in run\n' for i in range(30))
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "a.py", line 1, in run
  | ExceptionGroup: 1 error
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "b.py", line 2, in ask
    | KeyError: 'inner'
    +------------------------------------
"""


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("run: ValueError: planted", "agent 'player' failed: HarnessError: run: ValueError: planted"),
        (
            f"harness 'default' exited 1: Traceback (most recent call last):\n{FRAMES}KeyError: 'planted'\nmore\n",
            "agent 'player' failed: KeyError: 'planted' more",
        ),
        (f"{FRAMES[37:]}ValueError: the start is cut\n", "agent 'player' failed: ValueError: the start is cut"),
        (GROUP, "agent 'player' failed: KeyError: 'inner'"),
        (
            f"Traceback (most recent call last):\n{FRAMES}ValueError: DefaultRenderer does not support tools\n",
            "agent 'player' failed: ValueError: DefaultRenderer does not support tools; set [task.renderer] name = ...",
        ),
    ],
)
def test_the_cause_of_a_traceback_comes_first(message: str, text: str) -> None:
    assert failure_text("HarnessError", message, agent="player") == text


def test_a_long_error_keeps_its_begin_and_the_message_of_the_run_fits() -> None:
    trace = f"exited 1: Traceback (most recent call last):\n{FRAMES}RuntimeError: planted {'long ' * 500}"
    text = failure_text("HarnessError", trace, agent="player")
    assert text.startswith("agent 'player' failed: RuntimeError: planted long")
    with pytest.raises(StateError, match="RuntimeError: planted") as error:
        check_failures({f"StateError: verifiers: {text}": 128}, 128, 0.5)
    assert len(str(error.value)) <= 300
    errors = Counter({f"StateError: verifiers: {text}": 8})
    failed = Collected(
        groups=(), num_reward_errors=8, num_unscored=0, num_empty=0, num_overlong=0, num_turns=8, numbers={},
        reward_errors=tuple(f"prompt 'q', sample {i}: {error}" for i, error in enumerate(errors)), error_counts=errors,
    )  # fmt: skip
    with pytest.raises(StateError, match=r"^prompt 'q', sample 0: StateError: verifiers: agent .* planted") as error:
        FailedSteps("verifiers taskset").note(1, failed)
    assert len(str(error.value)) <= 300
    assert len(in_words(RuntimeError("long " * 500))) <= 300
    assert len(in_words(SystemExit("long " * 500))) <= 300
