"""The part sft with a small model: equal layouts, equal turns of two engines, whole tasks."""

import json
from pathlib import Path

import pytest
from benchmarks.real import sft

from tests.cli.test_turn_ends import KINDS, save_base
from treering.data import Message, ToolCall, Trajectory


def agent(task: str, *answers: str) -> Trajectory:
    """A chat whose first turn is a call and whose others are texts."""
    call = Message(role="assistant", content=None, tool_calls=(ToolCall(name="find", arguments='{"x": 1}'),))
    chat = [Message(role="system", content="s" * 40), Message(role="user", content=task), call]
    for answer in answers:
        chat += [Message(role="tool", content="t" * 40), Message(role="assistant", content=answer)]
    return Trajectory(task_id=task, messages=tuple(chat))


AGENTS = [agent("a", "1", "2"), agent("b", "3"), agent("a", "1", "3"), agent("c", "4" * 200)]


def test_tasks_stay_whole_and_those_of_one_path_are_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft, "CUT", {"system": 7, "tool": 5})
    monkeypatch.setattr(sft, "MAX_CHARACTERS", 100)
    trained, held = sft.split(AGENTS)
    assert [each.task_id for each in trained] == ["a", "a"]
    assert [each.task_id for each in held] == ["b"]
    texts = [message.content for message in trained[1].messages or ()]
    assert texts == ["sssssss", "a", None, "ttttt", "1", "ttttt", "3"]


@pytest.mark.timeout(300)
def test_both_layouts_train_alike_and_both_engines_write_the_same_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    monkeypatch.setattr(sft, "MAX_TURN_TOKENS", 6)
    model = save_base(tmp_path / "base", KINDS["chatml"][0])
    found = {
        weights: sft.measure_sft(tmp_path / "sft", model, AGENTS, weights, on_progress=lambda text: None)
        for weights in sft.WEIGHTS
    }
    for own in found.values():
        assert own["loss_difference"] < 1e-5
        plain, tree = own["sides"]["plain"], own["sides"]["treering"]
        assert len(plain["losses"]) == len(tree["losses"]) == sft.NUM_EPOCHS
        assert plain["computed_tokens"] == plain["flat_tokens"] == tree["flat_tokens"] > tree["computed_tokens"]
        assert own["turns"]["num_equal"] == own["turns"]["num_chats"] == sft.NUM_CHATS
    json.dumps(found, allow_nan=False)
