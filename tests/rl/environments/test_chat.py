"""Reading a turn: calls and answers count after the thought. Some chats continue after sampled tokens."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.conftest import save_tokenizer
from tests.data.rendering.test_call_formats import CALLS
from tests.engine.scripted import ScriptedEngine
from treering.data.trajectory import ToolCall
from treering.engine.host import EngineHost
from treering.engine.protocol import Request, Sampling
from treering.errors import UnsupportedError
from treering.rl.environments.chat import (
    BYTES_FOLDER,
    ChatMemory,
    ChatTokens,
    ReadTurn,
    as_messages,
    as_tools,
    short_id,
)
from treering.rl.environments.environment import Environment, EnvTask
from treering.rl.environments.library_tools import StepEnvironment, ToolEnvironment
from treering.rl.environments.policy_calls import CallLimits, Policy, Session

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
CALL = '{"name": "add", "arguments": {"a": 1}}'
ADD = (ToolCall(name="add", arguments={"a": 1}),)
SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "[THINK]", "[/THINK]", "<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
    *("<|call|>", "<|constrain|>", "<|return|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
]
THOUGHTS = {
    "think": ("<think>\n", "\n</think>\n\n"),
    "long think": ("<seed:think>", "</seed:think>"),
    "thinking": ("<thinking>", "</thinking>"),
    "reasoning": ("<reasoning>", "</reasoning>"),
    "thought": ("<thought>", "</thought>"),
    "Kimi": ("◁think▷", "◁/think▷"),
    "Mistral": ("[THINK]", "[/THINK]"),
    "Cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "Gemma": ("<|channel>thought\n", "<channel|>"),
    "gpt-oss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
}


def tokens_of(folder: Path, form: str = "Hermes", opening: str = "") -> ChatTokens:
    template = (
        "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        f"{{{{ m.content }}}}{{% for c in m.tool_calls or [] %}}{CALLS.get(form, form)}{{% endfor %}}<|im_end|>\n"
        f"{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{opening}{{% endif %}}"
    )
    return ChatTokens(save_tokenizer(folder, SPECIAL, chat_template=template))


def turn_of(chat: ChatTokens, text: str, *, tools: bool = True) -> ReadTurn:
    """Return the turn of a text that the model writes after a question."""
    schemas = as_tools([TOOL]) if tools else ()
    context = chat.prompt(as_messages([{"role": "user", "content": "Hi"}]), schemas)
    tokens = chat.text.encode(f"{text}<|im_end|>")
    return chat.read(context, lambda decode: decode(tokens), schemas)


@pytest.mark.parametrize("tags", THOUGHTS.values(), ids=THOUGHTS)
@pytest.mark.parametrize("call", [f"<tool_call>{CALL}</tool_call>", f"\n{CALL}\n"], ids=["tagged", "a line"])
def test_no_call_inside_a_thought_runs(tmp_path: Path, tags: tuple[str, str], call: str) -> None:
    begin, end = tags
    chat = tokens_of(tmp_path)
    tagged = f"<tool_call>{CALL}</tool_call>"
    assert turn_of(chat, f"{begin}I could {call}").calls == ()
    assert turn_of(chat, f"{begin}I could {call}").text == ""
    assert turn_of(chat, f"{begin}I could {call}{end}No.").calls == ()
    assert turn_of(chat, f"{begin}I could {call}{end}No.").text == "No."
    done = turn_of(chat, f"{begin}I could {call}{end}So: {tagged}")
    assert (done.calls, done.text) == (ADD, "So:")


@pytest.mark.parametrize("opening", ["<think>\n", "[THINK]", "<reasoning>"])
def test_a_thought_that_the_prompt_opens_is_one(tmp_path: Path, opening: str) -> None:
    chat = tokens_of(tmp_path, opening=opening)
    tagged, end = f"<tool_call>{CALL}</tool_call>", opening.strip().replace("[", "[/").replace("<", "</")
    assert turn_of(chat, f"so {tagged}").calls == ()
    assert turn_of(chat, "so 4", tools=False).text == ""
    assert turn_of(chat, f"so {tagged}{end}4", tools=False).text == "4"
    assert turn_of(chat, f"so {tagged}{end}{tagged}").calls == ADD


def test_the_message_of_a_turn_keeps_its_thought(tmp_path: Path) -> None:
    chat = tokens_of(tmp_path)
    tagged = f"<tool_call>{CALL}</tool_call>"
    seen = turn_of(chat, f"<think>hm</think>So {tagged}").message
    assert (seen["content"], "reasoning_content" in seen) == ("<think>hm</think>So", False)
    # Special tokens have no text in a message, so the thought is separate.
    apart = turn_of(chat, f"[THINK]hm[/THINK]So {tagged}").message
    assert (apart["content"], apart["reasoning_content"]) == ("So", "hm")
    assert turn_of(chat, "[THINK]hm", tools=False).message["reasoning_content"] == "hm"
    assert turn_of(chat, "<think>hm</think>\n\n4", tools=False).content == "<think>hm</think>\n\n4"


def test_calls_between_special_tokens_are_read(tmp_path: Path) -> None:
    harmony = tokens_of(tmp_path / "harmony", "harmony")
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
    found = turn_of(harmony, f"{thought}{call}")
    assert (found.calls, found.text, found.thought) == (ADD, "", "hm")
    answer = turn_of(harmony, f"{thought}<|channel|>final<|message|>four<|return|>")
    assert (answer.calls, answer.text, answer.content, answer.thought) == ((), "four", "four", "hm")
    assert turn_of(harmony, "<|channel|>final<|message|>four<|return|>").text == "four"
    gemma = tokens_of(tmp_path / "gemma", "Gemma 4")
    assert turn_of(gemma, "So.<|tool_call>call:add{a:1}<tool_call|>").calls == ADD


def test_an_unknown_form_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    chat = tokens_of(tmp_path, "CALL {{ c.function.name }}")
    question = as_messages([{"role": "user", "content": "Hi"}])
    with pytest.raises(UnsupportedError, match="writes a call of find_it as 'CALL find_it"):
        ChatMemory(chat).context(question, as_tools([TOOL]))
    assert ChatMemory(chat).context(question, ()).size


def test_ids_of_calls_have_nine_letters_or_digits_and_the_models_own_stay(tmp_path: Path) -> None:
    found = ReadTurn(text="", content="", calls=(*ADD, *ADD, ToolCall(name="f", arguments={}, id="mine")))
    ids = [call.id for call in found.with_ids("chat").calls]
    assert ids == [short_id("chat", 0), short_id("chat", 1), "mine"]
    assert all(len(each) == 9 and each.isalnum() for each in ids[:2])
    assert ids[0] != ids[1]


ARGUMENTS = '{"b": {"y": 2, "x": [1.0, true]}, "a": "ä"}'
SENT_BACK: dict[str, tuple[dict[str, Any], bool]] = {
    "null text": ({"content": None}, True),
    "no text": ({}, True),
    "other spaces": ({"arguments": '{"b":{"y":2,"x":[1.0,true]},"a":"ä"}'}, True),
    "other order": ({"arguments": '{"a": "ä", "b": {"x": [1.0, true], "y": 2}}'}, True),
    "escapes": ({"arguments": '{"b": {"y": 2, "x": [1.0, true]}, "a": "\\u00e4"}'}, True),
    "JavaScript's numbers": ({"arguments": '{"b": {"y": 2, "x": [1, true]}, "a": "ä"}'}, True),
    "an object": ({"arguments": json.loads(ARGUMENTS)}, True),
    "without the thought": ({"reasoning_content": None}, True),
    "other thought": ({"reasoning_content": "no"}, False),
    "other text": ({"content": "So!"}, False),
    "other order of a list": ({"arguments": '{"b": {"y": 2, "x": [true, 1.0]}, "a": "ä"}'}, False),
    "another type": ({"arguments": '{"b": {"y": 2, "x": [1.0, 1]}, "a": "ä"}'}, False),
    "other id": ({"id": "c2"}, False),
}


@pytest.mark.parametrize(("changes", "is_same"), SENT_BACK.values(), ids=SENT_BACK)
def test_a_turn_that_a_client_sends_back_keeps_its_sampled_ids(changes: dict[str, Any], is_same: bool) -> None:
    chat = ChatTokens(BYTES_FOLDER)
    memory, question = ChatMemory(chat), {"role": "user", "content": "Hi"}
    text = "So!" if changes.get("content") == "So!" else ""

    def turn(arguments: Any, **fields: Any) -> dict[str, Any]:
        call = {"type": "function", "id": fields.pop("id", "c1"), "function": {"name": "add", "arguments": arguments}}
        return {"role": "assistant", "tool_calls": [call], **fields}

    known = as_messages([question, turn(ARGUMENTS, content="", reasoning_content="hm")])
    context = chat.prompt(known[:1], ())
    # Ids that no template would give this text.
    path = np.concatenate([context, chat.text.encode(f"spelled {text}otherwise<|im_end|>")])
    memory.note(known, (), path)
    given = {"arguments": ARGUMENTS, "reasoning_content": "hm"} | changes
    sent = as_messages([question, turn(**given), {"role": "tool", "tool_call_id": "c1", "content": "2"}])
    assert (memory.context(sent, ())[: path.size].tolist() == path.tolist()) == is_same


class Adder:
    """Adds, and is rewarded for a sum of four."""

    def reset(self) -> None:
        self.sum = 0

    def add(self, a: int) -> int:
        """Adds."""
        self.sum += a
        return self.sum

    def get_reward(self) -> float:
        return float(self.sum == 4)


def played(chat: ChatTokens, environment: Environment, *turns: str) -> Any:
    """Return what an episode gives in which the model writes these turns."""
    left = iter(turns)

    def script(request: Request) -> list[int]:
        return [*chat.text.encode(next(left)).tolist(), *chat.text.encode("<|im_end|>").tolist()]

    limits = CallLimits(max_context=4000, max_turn_tokens=500)
    sampling = Sampling(max_tokens=4000, stop_tokens=tuple(chat.text.encode("<|im_end|>").tolist()))
    with EngineHost(ScriptedEngine(script, max_batch=1)) as host:
        fields = {"prompt_id": "q", "draw": 0, "sample": 0, "sampling": sampling, "limits": limits, "chat": chat}
        return asyncio.run(environment.run(environment.tasks[0], Policy(Session(host=host, **fields))))


@pytest.mark.parametrize("form", ["Hermes", "GLM", "Qwen3-Coder", "LFM2", "Gemma 4", "Llama 3", "Mistral", "DeepSeek"])
def test_an_episode_calls_its_tools_in_the_form_of_the_template(tmp_path: Path, form: str) -> None:
    chat = tokens_of(tmp_path, form)
    environment = ToolEnvironment(Adder, [EnvTask(id="q", data={"prompt": "Make four."})])
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "name": "add", "arguments": {"a": 2}}]}
    whole = chat.renderer.chat_template.text(as_messages([{"role": "user", "content": "Hi"}, call]))
    twice = whole.rpartition("assistant\n")[2].removesuffix("<|im_end|>\n")
    assert played(chat, environment, twice, f"<think>{twice}</think>{twice}", f"<think>{twice}") == 1.0
    with pytest.raises(UnsupportedError, match="read the calls from reply"):
        played(tokens_of(tmp_path, "CALL {{ c.function.name }}"), environment, twice)


class Guess:
    def reset(self) -> str:
        return "Say four."

    def step(self, action: str) -> tuple[str, float, bool]:
        return "", float(action == "4"), True


def test_an_action_is_what_follows_the_thought(tmp_path: Path) -> None:
    chat, environment = tokens_of(tmp_path), StepEnvironment(Guess, [EnvTask(id="q")])
    for text, reward in (("<think>5?</think>\n4", 1.0), ("<think>4</think>5", 0.0), ("<think>4", 0.0)):
        assert list(played(chat, environment, text).turn_rewards.values()) == [reward]
