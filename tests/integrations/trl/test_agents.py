"""Agents of several turns: TRL's own loop of tools, and its environments.

Whether an answer calls a tool depends on its place in the episode, so that only the loop is TRL's.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.trl import runs
from tests.integrations.trl.test_exactness import GRADIENTS
from treering.integrations.trl import HistoryRollouts

pytestmark = pytest.mark.filterwarnings("default")

NUM_TURNS = 8
_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}w5 {{ m['content'] }} {% else %}w2 {{ m['content'] }} "
    "{% for call in m.get('tool_calls') or [] %}w6 {{ call['function']['name'] }} "
    "{% for key, value in call['function']['arguments'].items() %}{{ key }} {{ value }} {% endfor %}{% endfor %}"
    "{% if m['role'] == 'assistant' %}<eos> {% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}w2 {% endif %}"
)
RESULT = 5
"""The token that a tool's result begins with."""


def w9(w4: str) -> str:
    """Repeats a word.

    Args:
        w4: a word.

    Returns:
        The word twice.
    """
    return f"{w4} {w4} w7"


class Room:
    """Environment whose only tool returns how often it was called."""

    def reset(self, **_: Any) -> None:
        self._num_calls, self._heard = 0, 0

    def w9(self, w4: str) -> str:
        """Counts a call.

        Args:
            w4: a word.

        Returns:
            The word and the count.
        """
        self._num_calls += 1
        self._heard += int(w4[1:])
        return f"{w4} w{10 + self._num_calls}"

    def get_reward(self) -> float:
        return self._heard % 7 / 7


def call_of(tokenizer: Any, ids: list[int], prefix: list[int] | None = None, tools: Any = None) -> dict[str, Any]:
    """Return the message of an answer: a tool call in all turns but the last, which some episodes reach early."""
    turn = 1 + list(prefix or []).count(RESULT)
    message: dict[str, Any] = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
    if turn < NUM_TURNS - ids[0] % 2:
        function = {"name": "w9", "arguments": {"w4": f"w{ids[0]}"}}
        message["tool_calls"] = [{"type": "function", "function": function}]
    return message


def answers(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
    made = []
    for index, ids in enumerate(prompt_ids):
        rng = random.Random(hash((tuple(ids), index % 2)))
        made.append([*(rng.randrange(10, 30) for _ in range(3)), runs.EOS])
    return made, None


def agent(model: str, out: Path, **options: Any) -> Any:
    tokenizer = runs.tokenizer()
    tokenizer.chat_template = _TEMPLATE
    tokenizer.response_template = {}
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in runs.prompts()]
    given = {"processing_class": tokenizer, "train_dataset": runs.Dataset.from_list(rows)}
    given |= options.pop("trainer_options")
    return runs.grpo(model, out, trainer_options=given, max_completion_length=120, **options)


def scripted(model: str, out: Path, **options: Any) -> Any:
    made = agent(model, out, **options)
    made._generate_single_turn = answers
    return made


# TRL appends to a list of rewards, so each run gets a new one.
KINDS = {"tools": lambda: {"tools": [w9]}, "environment": lambda: {"environment_factory": Room, "reward_funcs": []}}


@pytest.mark.parametrize("kind", KINDS)
def test_episodes_of_eight_turns_have_the_gradients_of_the_stock_trainer(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl.trainer.grpo_trainer.parse_response", call_of)
    stock, ours = (
        runs.train(scripted, runs.saved(), tmp_path / str(shared), shared=shared, trainer_options=KINDS[kind]())
        for shared in (None, {"group_batches": False})
    )
    assert len(stock.gradients) == 3
    assert runs.apart(ours.gradients, stock.gradients) <= GRADIENTS
    assert max(runs.metrics_apart(ours.logs, stock.logs).values()) <= 1e-5
    for log in ours.logs[:-1]:
        assert 6 <= log["tools/call_frequency"] <= 7
        assert log["tools/failure_frequency"] == 0
        assert log["tree/token_ratio"] > 1


@pytest.mark.parametrize("kind", KINDS)
def test_attached_rollouts_have_the_trainers_log_probs_in_trls_own_loop(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl.trainer.grpo_trainer.parse_response", call_of)
    trainer = agent(runs.saved(), tmp_path, trainer_options=KINDS[kind]())
    HistoryRollouts().attach(trainer)
    generate, errors = trainer._generate, []

    def checked(prompts: list[Any]) -> Any:
        prompt_ids, answers, masks, _, logprobs, *_ = found = generate(prompts)
        errors.extend(runs.logprob_errors(trainer, prompt_ids, answers, logprobs, masks))
        return found

    monkeypatch.setattr(trainer, "_generate", checked)
    trainer.train()
    assert len(errors) == 3 * 8
    assert max(errors) <= 2.5e-5
    assert min(log["tools/call_frequency"] for log in trainer.state.log_history[:-1]) > 2
