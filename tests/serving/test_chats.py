"""A chat over HTTP continues after the very ids that were sampled, and its tool calls are read."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.scripted import ScriptedEngine
from tests.rl.rollouts import rollout_of
from tests.serving.test_server import ask, settings
from treering.engine.host import EngineHost
from treering.engine.protocol import Request, Rollout, TopLogprobs
from treering.rl.environments.chat import BYTES_FOLDER, ChatTokens
from treering.serving import HostSampler, Server
from treering.serving import chats as module
from treering.serving.bodies import Fields, take_sampling
from treering.serving.chats import Chat, Chats

CHAT = "/v1/chat/completions"
TOKENS = ChatTokens(BYTES_FOLDER)
(END,) = TOKENS.text.end_tokens[:1]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ADD = '{"name": "add", "arguments": {"a": 1}}'


class Says(ScriptedEngine):
    """Engine that plays a script and records the contexts."""

    def __init__(self, *texts: str) -> None:
        self.contexts: list[list[int]] = []
        texts_left = iter(texts)

        def script(request: Request) -> list[int]:
            self.contexts.append(request.prompt.tolist())
            return [*TOKENS.text.encode(next(texts_left)).tolist(), END]

        super().__init__(script, max_batch=4)


@pytest.fixture
def engine() -> Says:
    return Says("one", ADD, "three")


@pytest.fixture
def server(engine: Says) -> Iterator[Server]:
    with (
        EngineHost(engine) as host,
        Server(HostSampler(host), model="tiny", num_positions=500, chat=TOKENS, settings=settings()) as opened,
    ):
        yield opened


def chat(server: Server, messages: list[Any], **given: Any) -> dict[str, Any]:
    body = {"messages": messages, "return_token_ids": True, **given}
    status, answer = ask(server, CHAT, body, **{"X-Session-ID": "s"})
    assert status == 200, answer
    return answer["choices"][0]


def test_each_turn_goes_on_after_the_sampled_ids_and_calls_are_read(server: Server, engine: Says) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    first = chat(server, messages)
    assert (first["message"]["content"], first["finish_reason"]) == ("one", "stop")
    messages += [first["message"], {"role": "user", "content": "go on"}]
    second = chat(server, messages, tools=[TOOL], logprobs=True)
    (call,) = second["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    assert second["finish_reason"] == "tool_calls"
    assert len(second["logprobs"]["content"]) == len(second["token_ids"])
    assert "".join(each["token"] for each in second["logprobs"]["content"]) == f"{ADD}<|im_end|>"
    messages += [second["message"], {"role": "tool", "tool_call_id": call["id"], "content": "2"}]
    third = chat(server, messages, tools=[TOOL])
    assert third["message"]["content"] == "three"
    contexts = [np.array(context) for context in engine.contexts]
    for before, answer, after in zip(contexts, (first, second), contexts[1:], strict=False):
        path = [*before, *answer["token_ids"]]
        # Tools given only from the second turn on make another prompt.
        if answer is second:
            assert after[: len(path)].tolist() == path
    assert [answer["prompt_token_ids"] for answer in (first, second, third)] == engine.contexts


def test_a_turn_that_a_client_sends_back_in_its_own_spelling_keeps_its_ids(server: Server, engine: Says) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    chat(server, messages, tools=[TOOL])
    answer = chat(server, messages, tools=[TOOL])
    [call] = answer["message"]["tool_calls"]
    spelled = {**call["function"], "arguments": '{ "a":1 }'}
    sent = {**answer["message"], "content": None, "tool_calls": [{**call, "function": spelled}]}
    last = chat(server, [*messages, sent, {"role": "tool", "tool_call_id": call["id"], "content": "2"}], tools=[TOOL])
    path = [*answer["prompt_token_ids"], *answer["token_ids"]]
    assert last["prompt_token_ids"][: len(path)] == path


class Tops(Says):
    def step(self) -> list[Any]:
        def with_top(rollout: Rollout) -> Rollout:
            return replace(rollout, top=TopLogprobs(rollout.tokens[:, None], np.full((rollout.num_tokens, 1), -np.inf)))

        return [with_top(rollout) for rollout in super().step()]


def test_likeliest_tokens_of_a_chat_have_their_bytes() -> None:
    with (
        EngineHost(Tops("ä")) as host,
        Server(
            HostSampler(host), model="tiny", num_positions=500, texts=TOKENS.text, chat=TOKENS, settings=settings()
        ) as server,
    ):
        choice = chat(server, [{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=1)
    assert [each["top_logprobs"] for each in choice["logprobs"]["content"]] == [
        [{"token": "bytes:\\xc3", "bytes": [0xC3], "logprob": -9999.0}],
        [{"token": "bytes:\\xa4", "bytes": [0xA4], "logprob": -9999.0}],
        [{"token": "<|im_end|>", "bytes": list(b"<|im_end|>"), "logprob": -9999.0}],
    ]


def test_log_probs_have_the_bytes_of_tokens_that_are_parts_of_a_character() -> None:
    with (
        EngineHost(Says("ä!", "ä!")) as host,
        Server(
            HostSampler(host), model="tiny", num_positions=500, texts=TOKENS.text, chat=TOKENS, settings=settings()
        ) as server,
    ):
        content = chat(server, [{"role": "user", "content": "Hi"}], logprobs=True)["logprobs"]["content"]
        _, answer = ask(server, "/v1/completions", {"prompt": "Hi", "logprobs": 1})
    assert [each["bytes"] for each in content] == [[0xC3], [0xA4], [0x21], list(b"<|im_end|>")]
    expected = ["bytes:\\xc3", "bytes:\\xa4", "!", "<|im_end|>"]
    assert [each["token"] for each in content] == expected
    assert answer["choices"][0]["logprobs"]["tokens"] == expected


def test_a_chat_without_a_session_is_rendered_again(server: Server, engine: Says) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    ask(server, CHAT, {"messages": messages})
    assert engine.contexts == [ChatTokens(BYTES_FOLDER).prompt(_records(messages), ()).tolist()]


def _records(messages: list[Any]) -> Any:
    from treering.rl.environments.chat import as_messages

    return as_messages(messages)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": ["Hi"]}, "'Hi'"),
        ({"messages": [{"role": "user", "content": "Hi"}], "tools": [3]}, "tools"),
        ({"messages": [{"role": "user", "content": "Hi"}], "response_format": {"type": "json_object"}}, "masked"),
        ({"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image"),
    ],
)
def test_an_invalid_chat_is_refused_by_name(server: Server, body: dict[str, Any], words: str) -> None:
    status, answer = ask(server, CHAT, body)
    assert status == 400
    assert words in answer["error"]["message"]


def test_what_is_remembered_of_chats_is_bounded_and_the_latest_sessions_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = take_sampling(Fields({}, "the body"), num_left=100, default_max_tokens=None)
    chats = Chats(TOKENS)

    def answered(session: str, messages: list[Any]) -> Chat:
        taken = chats.take(Fields({"messages": messages}, "the body"), session)
        chats.answer("id", "tiny", taken, [rollout_of([ord("a")])], asked)
        return taken

    first: list[Any] = [{"role": "user", "content": "Hi"}]
    size = answered("0", first).context.size + 1
    monkeypatch.setattr(module, "MAX_CHAT_TOKENS", 8 * size)
    memories = [answered(str(number), first).memory for number in range(1, 30)]
    assert 4 * size <= sum(memory.num_tokens for memory in chats._memories.values()) <= 8 * size
    assert chats.take(Fields({"messages": first}, "the body"), "29").memory is memories[-1]
    assert chats.take(Fields({"messages": first}, "the body"), "1").memory is not memories[0]
