"""A streamed answer is the whole answer in pieces, and its first pieces arrive while the rest is sampled."""

import json
import shutil
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.scripted import ScriptedEngine
from tests.serving.test_chats import ADD, CHAT, TOKENS, TOOL, Says
from tests.serving.test_server import ask, serving, settings, wait_for
from treering.engine.host import EngineHost
from treering.rl.environments.chat import BYTES_FOLDER, ChatTokens
from treering.serving import HostSampler, Server

COMPLETE = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


def lines(server: Server, path: str, body: dict[str, Any]) -> Iterator[Any]:
    """Yield the events of a streamed answer as they arrive, the last as text."""
    request = urllib.request.Request(server.url + path, json.dumps(body | {"stream": True}).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        for line in response:
            if line.strip():
                assert line.startswith(b"data: ")
                text = line[6:].decode().strip()
                yield text if text == "[DONE]" else json.loads(text)


def joined(found: list[Any]) -> dict[int, dict[str, Any]]:
    """Return each choice as a client puts it together."""
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in found for choice in event["choices"]):
        whole = choices.setdefault(choice["index"], {"text": "", "num_pieces": 0})
        assert "finish_reason" not in whole
        piece = choice.get("delta", choice)
        whole["text"] += piece.get("text") or piece.get("content") or ""
        whole["num_pieces"] += 1
        whole |= {name: piece[name] for name in ("role", "tool_calls") if name in piece}
        if choice["finish_reason"] is not None:
            whole |= {name: choice[name] for name in ("finish_reason", "logprobs", "token_ids") if name in choice}
    return choices


@contextmanager
def chatting(*texts: str, tokens: ChatTokens = TOKENS) -> Iterator[tuple[Server, Says]]:
    engine = Says(*texts)
    with (
        EngineHost(engine) as host,
        Server(
            HostSampler(host), model="tiny", num_positions=500, texts=tokens.text, chat=tokens, settings=settings()
        ) as server,
    ):
        yield server, engine


@pytest.mark.parametrize("stop_size", [0, 1, 2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_a_streamed_completion_is_the_whole_one_in_pieces(seed: int, stop_size: int) -> None:
    body = {"prompt": "df", "max_tokens": 12, "seed": seed, "n": 2, "logprobs": 1, "return_token_ids": True}
    with serving() as (server, _):
        _, whole = ask(server, COMPLETE, body)
        if stop_size:
            # A stop string that the first answer samples, token by token, from its seventh letter on.
            stop = whole["choices"][0]["text"][6 : 6 + stop_size]
            _, whole = ask(server, COMPLETE, body := body | {"stop": [stop, "none"]})
            assert whole["choices"][0]["finish_reason"] == "stop"
        *found, last = lines(server, COMPLETE, body | {"stream_options": {"include_usage": True}})
    assert last == "[DONE]"
    assert (found[-1]["choices"], found[-1]["usage"]) == ([], whole["usage"])
    assert len({(event["id"], event["object"], event["created"], event["model"]) for event in found}) == 1
    choices = joined(found)
    for each in whole["choices"]:
        got = choices[each["index"]]
        assert {name: got[name] for name in ("text", "finish_reason", "logprobs", "token_ids")} == {
            name: each[name] for name in ("text", "finish_reason", "logprobs", "token_ids")
        }
        if stop_size == 0:
            assert got["num_pieces"] > 4


def test_a_streamed_chat_keeps_characters_whole() -> None:
    with chatting("Grüße, 四 🌲!") as (server, _):
        found = list(lines(server, CHAT, {"messages": HI}))
    pieces = [each["delta"].get("content") for event in found[:-1] for each in event["choices"]]
    assert "".join(pieces) == "Grüße, 四 🌲!"
    assert {"ü", "ß", "四", "🌲"} <= set(pieces)
    assert found[0]["object"] == "chat.completion.chunk"
    assert found[0]["choices"][0]["delta"]["role"] == "assistant"
    assert joined(found[:-1])[0]["finish_reason"] == "stop"


def test_the_first_piece_arrives_while_the_rest_is_sampled() -> None:
    goes_on = threading.Event()

    class Waits(ScriptedEngine):
        def step(self) -> list[Any]:
            assert goes_on.wait(60) if self.stats.num_sampled == 2 else True
            return super().step()

    with serving(Waits(lambda _request: [0, 1, 2, 3], max_batch=1)) as (server, _):
        events = lines(server, COMPLETE, {"prompt": "d"})
        assert next(events)["choices"][0]["text"] == "a"
        assert next(events)["choices"][0]["text"] == "b"
        goes_on.set()
        assert joined(list(events)[:-1])[0]["text"] == "cd"


@pytest.mark.parametrize(
    ("text", "more"),
    [
        (ADD, {"tools": [TOOL]}),
        (f"Let me see. <tool_call>{ADD}</tool_call>", {"tools": [TOOL]}),
        ("<think>2 + 2</think>4", {}),
        ("  <think>2 + 2", {}),
    ],
)
def test_a_turn_with_calls_or_a_thought_comes_whole(text: str, more: dict[str, Any]) -> None:
    with chatting(text, text) as (server, _):
        _, whole = ask(server, CHAT, {"messages": HI, **more})
        *found, _ = lines(server, CHAT, {"messages": HI, **more})
    (message,) = [choice["message"] for choice in whole["choices"]]
    assert len(found) == 1
    got = joined(found)[0]
    assert got["text"] == (message["content"] or "")
    assert got["finish_reason"] == whole["choices"][0]["finish_reason"]
    calls = [(call["index"], call["function"]) for call in got.get("tool_calls", [])]
    assert calls == list(enumerate(call["function"] for call in message.get("tool_calls", [])))


def test_a_turn_of_calls_alone_has_no_content() -> None:
    with chatting(ADD) as (server, _):
        _, answer = ask(server, CHAT, {"messages": HI, "tools": [TOOL]})
    assert answer["choices"][0]["message"]["content"] is None


def test_an_error_before_the_first_event_has_its_status_and_a_later_one_is_an_event() -> None:
    class Breaks(ScriptedEngine):
        def step(self) -> list[Any]:
            if self.stats.num_sampled == num_good:
                raise RuntimeError("out of memory")
            return super().step()

    for num_good in (0, 2):
        with serving(Breaks(lambda _request: [0, 1, 2, 3], max_batch=1)) as (server, _):
            if num_good == 0:
                status, answer = ask(server, COMPLETE, {"prompt": "d", "stream": True})
                assert (status, answer["error"]["message"]) == (500, "RuntimeError: out of memory")
                continue
            *found, last = lines(server, COMPLETE, {"prompt": "d"})
    assert joined(found)[0]["text"] == "ab"
    assert last["error"]["message"] == "RuntimeError: out of memory"


def test_a_client_that_leaves_a_stream_aborts_its_call() -> None:
    engine = ScriptedEngine(lambda _request: [1] * 60, max_batch=8)
    goes_on, step = threading.Event(), engine.step
    engine.step = lambda: step() if engine.stats.num_sampled < 6 or goes_on.wait(60) else []  # type: ignore[method-assign]
    with serving(engine) as (server, host):
        body = json.dumps({"prompt": "d", "max_tokens": 60, "n": 3, "stream": True}).encode()
        with socket.create_connection(server._socket.getsockname()) as leaving:
            leaving.sendall(
                f"POST {COMPLETE} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
            leaving.settimeout(60)
            assert b"text/event-stream" in leaving.recv(10_000)
            # The engine waits in its next step, so that the host takes no message in between.
            wait_for(lambda: engine.stats.num_sampled >= 6)
        wait_for(lambda: not server._loop.is_closed() and host._inbox.qsize() >= 3)
        goes_on.set()
        wait_for(lambda: host.is_waiting)
    assert engine.num_unfinished == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"stream": "yes"}, "stream of the body must be of type bool"),
        ({"stream_options": {"include_usag": True}}, "include_usag"),
    ],
)
def test_a_wrong_option_of_streams_is_refused_by_name(more: dict[str, Any], words: str) -> None:
    with chatting() as (server, _):
        for path, body in ((CHAT, {"messages": HI}), (COMPLETE, {"prompt": "Hi"})):
            status, answer = ask(server, path, body | more)
            assert (status, words in answer["error"]["message"]) == (400, True)


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}no {% endif %}{{ reasoning_effort or '' }}{% endif %}"
)


def test_a_chat_template_gets_the_variables_that_it_reads_and_refuses_others(tmp_path: Path) -> None:
    shutil.copytree(BYTES_FOLDER, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    variables = {"chat_template_kwargs": {"enable_thinking": False}}
    with chatting(*"abcde", tokens=ChatTokens(tmp_path)) as (server, engine):
        for more in ({}, variables, {"reasoning_effort": "low"}, variables | {"reasoning_effort": "low"}, {}):
            assert ask(server, CHAT, {"messages": HI, **more})[0] == 200
        ends = [TOKENS.text.decode(np.array(context)).rpartition("assistant\n")[2] for context in engine.contexts]
        assert ends == ["", "no ", "low", "no low", ""]
        for name in ("thinking", "messages", "add_generation_prompt"):
            status, answer = ask(server, CHAT, {"messages": HI, "chat_template_kwargs": {name: True}})
            assert (status, f"no variable '{name}'" in answer["error"]["message"]) == (400, True)
    with chatting() as (server, _):
        status, answer = ask(server, CHAT, {"messages": HI, "reasoning_effort": "low"})
        assert (status, "the plain form of chats has no variables" in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize("adds", [True, False])
def test_a_completion_may_leave_special_tokens_out(adds: bool) -> None:
    seen = []

    class Texts:
        def encode(self, text: str, *, adds_special: bool) -> Any:
            seen.append(adds_special)
            return TOKENS.text.encode(text)

        def decode(self, tokens: Any) -> str:
            return TOKENS.text.decode(tokens)

    with (
        EngineHost(Says("a")) as host,
        Server(HostSampler(host), model="tiny", num_positions=500, texts=Texts(), settings=settings()) as server,  # type: ignore[arg-type]
    ):
        assert ask(server, COMPLETE, {"prompt": "Hi", "add_special_tokens": adds})[0] == 200
    assert seen == [adds]
