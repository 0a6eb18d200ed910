"""A judge behind a URL: what it is asked, and how its replies are read, cached and retried. The server is local."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treering.config import RlConfig, load
from treering.errors import InputError, StateError
from treering.rl.tasks import judge as judge_module
from treering.rl.tasks.judge import Judge
from treering.rl.tasks.task import Prompt, Score
from treering.rl.tasks.text_reward import TextReward, WeightedReward


class Server(ThreadingHTTPServer):
    """Server that answers with what `reply` makes of the question: a status, and a text or all bytes of the answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.reply: Callable[[str], tuple[int, str | bytes | None]] = lambda question: (200, '{"score": 1}')

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.keys.append(self.headers["Authorization"])
        status, text = self.server.reply(body["messages"][0]["content"])
        answer = {"choices": [{"message": {"content": text}}]} if status == 200 else {"error": text}
        data = text if isinstance(text, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(judge_module.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def judge_at(url: str, cache: Path, **changes: Any) -> Judge:
    template = changes.pop("template", "{prompt}|{response}|{level}")
    return Judge(url=url, model="m", template=template, cache=cache, **changes)


def ask(judge: Judge, *texts: str) -> list[float | Exception]:
    return judge(prompts=["q"] * len(texts), completions=list(texts), level=[3] * len(texts))


def test_a_judge_is_asked_once_for_each_text_and_never_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    server.reply = lambda question: (200, f'Well: {{"score": {len(question)}}}.')
    settings = {"parameters": {"temperature": 0.0}}
    assert ask(judge_at(server.url, tmp_path, **settings), "a", "bcd", "a") == [5.0, 7.0, 5.0]
    assert sorted(body["messages"][0]["content"] for body in server.bodies) == ["q|a|3", "q|bcd|3"]
    assert all((body["model"], body["temperature"]) == ("m", 0.0) for body in server.bodies)
    assert server.keys == ["Bearer k"] * 2
    # Read from the cache, with another judge and without a server.
    assert ask(judge_at("http://127.0.0.1:9/v1", tmp_path, **settings), "bcd", "a") == [7.0, 5.0]
    next(iter(tmp_path.glob("*.json"))).write_text("{")
    assert ask(judge_at(server.url, tmp_path, **settings), "a", "bcd") == [5.0, 7.0]
    assert len(server.bodies) == 3


def test_texts_are_judged_at_the_same_time(server: Server, tmp_path: Path) -> None:
    barrier = threading.Barrier(4, timeout=60)

    def reply(question: str) -> tuple[int, str]:
        barrier.wait()
        return 200, '{"score": 2}'

    server.reply = reply
    assert ask(judge_at(server.url, tmp_path), *"abcd") == [2.0] * 4


def test_a_busy_server_is_asked_again_and_a_refusal_is_not(server: Server, tmp_path: Path) -> None:
    statuses = iter([503, 429, 200])
    server.reply = lambda question: (next(statuses), '{"score": 4}')
    assert ask(judge_at(server.url, tmp_path, num_retries=2), "a") == [4.0]
    server.reply = lambda question: (400, "no such model")
    [error] = ask(judge_at(server.url, tmp_path), "b")
    assert isinstance(error, StateError)
    assert "refused with 400" in str(error)
    assert "no such model" in str(error)
    assert len(server.bodies) == 4
    [error] = ask(judge_at("http://127.0.0.1:9/v1", tmp_path, num_retries=1), "c")
    assert "it failed 2 times, at last with URLError" in str(error)


@pytest.mark.parametrize("answer", [None, b"<html>", b"[]"])
def test_an_answer_without_a_text_fails_its_response_alone_and_is_not_kept(
    server: Server, tmp_path: Path, answer: bytes | None
) -> None:
    server.reply = lambda question: (200, answer if "|a|" in question else '{"score": 2}')
    error, score = ask(judge_at(server.url, tmp_path), "a", "b")
    assert isinstance(error, StateError)
    assert score == 2.0
    server.reply = lambda question: (200, '{"score": 3}')
    assert ask(judge_at(server.url, tmp_path), "a", "b") == [3.0, 2.0]


@pytest.mark.parametrize(
    ("pattern", "reply", "score"),
    [
        (r"Score: (-?[\d.]+)", "Score: 1, no, Score: -2.5", -2.5),
        (r"(\d)", "none", None),
        (None, 'thus {"score": 0.5, "why": "{}"}', 0.5),
        (None, "7", None),
        (None, '{"mark": 7}', None),
        (None, '<think>{"score": 9}?</think>{"score": 2}', 2.0),
        (None, '<think>{"score": 9}', None),
        (r"(\d)", "<think>so 9", None),
    ],
)
def test_a_score_is_the_last_match_or_a_field_of_json(
    server: Server, tmp_path: Path, pattern: str | None, reply: str, score: float | None
) -> None:
    server.reply = lambda question: (200, reply)
    [found] = ask(judge_at(server.url, tmp_path, pattern=pattern), "a")
    if score is not None:
        assert found == score
    else:
        assert isinstance(found, InputError)
        assert f"got {reply!r}" in str(found)


def test_a_judge_is_one_of_several_rewards_and_its_failures_leave_out_their_texts(
    server: Server, tmp_path: Path
) -> None:
    server.reply = lambda question: (400, "") if "bad" in question else (200, '{"score": 10}')
    parts = [WeightedReward(name="contains_answer"), WeightedReward(name="judge", weight=0.1)]
    reward = TextReward(parts, [], judge_at(server.url, tmp_path, template='{response} to {prompt}? {"score": 0}'))
    reward.bind(["answer"])
    parts_of_message = [{"type": "image", "text": None}, {"type": "text", "text": "q"}]
    columns = {"prompt": [{"role": "user", "content": parts_of_message}], "answer": "yes"}
    prompt = Prompt(prompt_id="p", tokens=np.array([1], np.int32), answer="yes", columns=columns)
    good, bad = reward.scores(prompt, ["yes", "bad"])
    assert good == Score(reward=2.0, numbers={"contains_answer": 1.0, "judge": 10.0})
    assert isinstance(bad, StateError)
    assert server.bodies[0]["messages"][0]["content"] in ('yes to q? {"score": 0}', 'bad to q? {"score": 0}')
    wrong = TextReward("judge", [], judge_at(server.url, tmp_path, template="{respones}"))
    wrong.bind([])
    with pytest.raises(InputError, match=r"may use \{prompt\}, \{response\} and columns, got \{respones\}; use one of"):
        wrong.try_on(prompt)


def test_a_judge_reads_what_follows_the_thought_and_gives_nothing_without_it(server: Server, tmp_path: Path) -> None:
    judge = judge_at(server.url, tmp_path, template='{response}? {"score": 0}')
    texts = ["<think>hm</think>yes", "<think>yes", [{"role": "assistant", "content": "[THINK]hm[/THINK]no"}]]
    assert judge(prompts=["q"] * 3, completions=texts) == [1.0, 0.0, 1.0]
    asked = sorted(body["messages"][0]["content"] for body in server.bodies)
    assert asked == ['no? {"score": 0}', 'yes? {"score": 0}']


def test_a_judge_and_weighted_rewards_are_configured() -> None:
    task = ["task.kind=prompts", "task.file=p", "task.tokenizer=t", "rl.num_steps=1"]
    overrides = ["task.judge.url=http://127.0.0.1:8000/v1", "task.judge.model=m"]
    assert load(RlConfig, None, [*task, *overrides, "task.reward=judge"]).task.uses_judge
    weighted = '[{name = "judge", weight = 0.5}, {name = "exact_answer"}]'
    config = load(RlConfig, None, [*task, f"task.reward={weighted}", *overrides])
    assert [(each.name, each.weight) for each in config.task.reward if not isinstance(each, str)] == [
        ("judge", 0.5),
        ("exact_answer", 1.0),
    ]
