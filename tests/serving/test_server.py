"""A server answers each call with the engine's own rollout, or refuses it by name, and loses none."""

import asyncio
import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.engine.scripted import ScriptedEngine
from tests.models import build_float64
from treering.engine.host import EngineHost
from treering.engine.protocol import Request, Sampling
from treering.engine.sampling.noise import call_id
from treering.engine.torch_engine import TorchEngine
from treering.errors import ConfigError
from treering.serving import HostSampler, Server, ServerSettings

MODEL = build_float64().eval()
NUM_POSITIONS = 64
ROUNDING = 1e-12
"""Relative, of float64 log-probs from passes of different shapes."""
GENERATE = "/inference/v1/generate"


class Letters:
    """Tokenizer whose token i is the i-th letter, from a."""

    def encode(self, text: str, *, adds_special: bool) -> np.ndarray:
        assert adds_special
        return np.array([ord(letter) - ord("a") for letter in text], np.int32)

    def bytes_of(self, token: int) -> bytes:
        return self.decode([token]).encode()

    def decode(self, tokens: Any) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


def make_engine() -> TorchEngine:
    return TorchEngine(MODEL, max_batch=4, max_tokens=512, costs="none", decode=Letters().decode)


def settings(**given: Any) -> ServerSettings:
    return ServerSettings(port=0, **given)


@contextmanager
def serving(engine: Any = None, **given: Any) -> Iterator[tuple[Server, EngineHost]]:
    with (
        EngineHost(engine or make_engine()) as host,
        Server(
            HostSampler(host), model="tiny", num_positions=NUM_POSITIONS, texts=Letters(), settings=settings(**given)
        ) as server,
    ):
        yield server, host


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as (opened, _):
        yield opened


def ask(server: Server, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def generate(server: Server, context: list[int], *, status: int = 200, salt: str | None = None, **params: Any) -> Any:
    body = {"model": "tiny", "token_ids": context, "sampling_params": {"max_tokens": 8, **params}}
    got, answer = ask(server, GENERATE, body if salt is None else body | {"cache_salt": salt})
    assert got == status, answer
    return answer["choices"] if status == 200 else answer["error"]["message"]


def ids(choices: list[dict[str, Any]]) -> list[list[int]]:
    return [choice["token_ids"] for choice in choices]


def test_an_answer_is_the_rollout_of_its_key(server: Server) -> None:
    context, params = [3, 5, 7], {"temperature": 0.8, "top_k": 20, "stop_token_ids": [9]}
    (choice,) = generate(server, context, salt="q1|2|3", **params)
    request = Request(
        prompt_id="q1",
        draw=2,
        sample=3,
        prompt=context,
        sampling=Sampling(max_tokens=8, temperature=0.8, top_k=20, stop_tokens=(9,)),
        call=call_id(np.array(context, np.int32)),
    )
    (rollout,) = make_engine().generate([request])
    assert choice["token_ids"] == rollout.tokens.tolist()
    assert choice["finish_reason"] == rollout.finish_reason
    content = choice["logprobs"]["content"]
    assert [each["token"] for each in content] == [f"token_id:{token}" for token in rollout.tokens]
    assert [each["logprob"] for each in content] == rollout.logprobs.tolist()
    assert choice["policy_versions"] == [0] * rollout.num_tokens


def test_equal_calls_with_a_seed_get_equal_answers_also_at_the_same_time(server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ids(generate(server, [3, 5], seed=11, n=2)), range(8)))
    assert all(each == answers[0] for each in answers)
    assert answers[0][0] != answers[0][1]
    assert ids(generate(server, [3, 5], seed=12)) != answers[0][:1]


def test_an_episode_that_samples_a_context_again_gets_another_answer_and_episodes_repeat() -> None:
    taken = []
    for _ in range(2):
        with serving() as (server, _):
            first, again = (generate(server, [3, 5], salt="q|0|1") for _ in range(2))
            other = generate(server, [3, 5], salt="q|0|2")
        taken.append([*ids(first), *ids(again), *ids(other)])
    assert taken[0] == taken[1]
    assert len({tuple(tokens) for tokens in taken[0]}) == 3


def test_temperature_zero_takes_the_likeliest_token_and_returns_its_probability(server: Server) -> None:
    (choice,) = generate(server, [3, 5, 7], temperature=0)
    assert ids([choice]) == ids(generate(server, [3, 5, 7], temperature=0))
    (rollout,) = make_engine().generate(
        [Request(prompt_id="", prompt=[3, 5, 7], sampling=Sampling(max_tokens=8, top_k=1))]
    )
    assert choice["token_ids"] == rollout.tokens.tolist()
    # The server's engine may have kept the prompt's keys, and passes of other shapes round differently.
    returned = [each["logprob"] for each in choice["logprobs"]["content"]]
    assert returned == pytest.approx(rollout.policy_logprobs.tolist(), rel=ROUNDING)
    assert max(rollout.policy_logprobs) < 0


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"min_tokens": 9}, "min_tokens must be at most max_tokens=8, got 9"),
        ({"tempreature": 0.5}, "tempreature"),
        ({"temperature": "hot"}, "temperature of sampling_params must be of type integer or number"),
        ({"temperature": -1.0}, "temperature: expected greater than 0, got -1"),
        ({"temperature": 10**400}, "temperature of sampling_params must fit a float"),
        ({"max_tokens": 0}, "max_tokens: expected greater than or equal to 1, got 0"),
        ({"max_completion_tokens": 4}, "max_tokens and max_completion_tokens are names of the same number"),
        ({"seed": -5}, "seed must be at least 0, got -5"),
        ({"top_k": -2}, "top_k: expected greater than or equal to 0, got -2"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"max_tokens": 1000}, "positions"),
        ({"logprobs": 21}, "0 to 20 likeliest tokens are returned, got logprobs=21"),
        ({"n": 0}, r"n, num_samples\) must lie in \[1, 1024\]"),
        ({"stop_token_ids": ["a"]}, "stop_tokens"),
    ],
)
def test_what_would_change_the_answer_and_is_not_done_is_refused(
    server: Server, params: dict[str, Any], words: str
) -> None:
    assert re.search(words, generate(server, [3, 5], status=400, **params))


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "the body is not JSON"),
        (b"[" * 100_000, 400, "the body is not JSON"),
        (b"[1]", 400, "the body must be a JSON object"),
        ({}, 400, "no token_ids"),
        ({"token_ids": []}, 400, "no token_ids|at least one"),
        ({"token_ids": [1, "a"]}, 400, "'a'"),
        ({"token_ids": [1, True]}, 400, "True"),
        ({"token_ids": [1, 10**6]}, 400, "another model"),
        ({"token_ids": [1] * NUM_POSITIONS}, 400, "no position"),
        ({"token_ids": [1], "model": "other"}, 404, "'tiny'"),
        ({"token_ids": [1], "features": {"mm_hashes": {}}}, 400, "images"),
        ({"token_ids": [1], "sampling_parms": {}}, 400, "sampling_parms"),
    ],
)
def test_a_bad_body_is_refused_by_name(server: Server, body: Any, status: int, words: str) -> None:
    got, answer = ask(server, GENERATE, body)
    assert got == status
    assert re.search(words, answer["error"]["message"])


@pytest.mark.parametrize("params", [{}, {"max_tokens": 2}])
@pytest.mark.parametrize("path", [GENERATE, "/v1/completions"])
def test_clients_know_a_full_context_by_its_code_and_words(server: Server, path: str, params: dict[str, int]) -> None:
    context = [1] * (NUM_POSITIONS - bool(params))
    generates = {"token_ids": context, "sampling_params": params}
    status, answer = ask(server, path, generates if path == GENERATE else {"prompt": context, **params})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert f"maximum context length is {NUM_POSITIONS} tokens" in answer["error"]["message"]


def test_text_goes_in_and_out_and_ends_before_its_stop(server: Server) -> None:
    body = {"model": "tiny", "prompt": "df", "max_tokens": 8, "seed": 3, "logprobs": 1, "return_token_ids": True}
    _, answer = ask(server, "/v1/completions", body)
    (choice,) = answer["choices"]
    tokens = choice["token_ids"]
    assert choice["prompt_token_ids"] == [3, 5]
    assert choice["text"] == Letters().decode(tokens)
    assert tokens == ids(generate(server, [3, 5], seed=3))[0]
    assert choice["logprobs"]["tokens"] == [Letters().decode([token]) for token in tokens]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10}
    _, other = ask(server, "/v1/completions", body | {"logprobs": 0})
    for name in ("tokens", "token_logprobs"):
        assert other["choices"][0]["logprobs"][name] == choice["logprobs"][name]
    stopped = {}
    for name, stop in (("stop", choice["text"][2:4]), ("stop_token_ids", [tokens[3]])):
        _, answer = ask(server, "/v1/completions", body | {name: stop})
        stopped[name] = answer["choices"][0]
    assert stopped["stop"]["text"] == choice["text"][:2]
    assert stopped["stop"]["token_ids"] == tokens[:4]
    assert stopped["stop_token_ids"]["text"] == choice["text"][: tokens.index(tokens[3])]
    assert {each["finish_reason"] for each in stopped.values()} == {"stop"}


def test_likeliest_tokens_are_the_engines_and_one_that_cannot_come_has_the_log_prob_of_vllm(server: Server) -> None:
    params = {"max_tokens": 6, "seed": 3, "top_k": 2, "min_tokens": 5, "stop_token_ids": [*range(16)]}
    sampling = Sampling(max_tokens=6, top_k=2, min_tokens=5, stop_tokens=tuple(range(16)), num_top_logprobs=3)
    request = Request(
        prompt_id="", draw=3, prompt=[3, 5], sampling=sampling, call=call_id(np.array([3, 5], np.int32), 0)
    )
    (rollout,) = make_engine().generate([request])
    top = [
        [*zip(tokens, np.maximum(values, -9999.0).tolist(), strict=True)]
        for tokens, values in zip(rollout.top.tokens.tolist(), rollout.top.logprobs, strict=True)
    ]
    assert all(each[2][1] == -9999.0 for each in top)
    (choice,) = generate(server, [3, 5], logprobs=3, **params)
    assert choice["token_ids"] == rollout.tokens.tolist()
    returned = [
        {int(each["token"].removeprefix("token_id:")): each["logprob"] for each in entry["top_logprobs"]}
        for entry in choice["logprobs"]["content"]
    ]
    assert [list(each) for each in returned] == [[token for token, _ in each] for each in top]
    assert returned == [pytest.approx(dict(each), rel=ROUNDING) for each in top]
    _, answer = ask(server, "/v1/completions", {"prompt": [3, 5], "logprobs": 3, **params})
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [
        pytest.approx({Letters().decode([token]): value for token, value in each}, rel=ROUNDING) for each in top
    ]
    (plain,) = generate(server, [3, 5], logprobs=1, **params)
    assert [each.keys() for each in plain["logprobs"]["content"]] == [{"token", "logprob"}] * rollout.num_tokens


def test_an_early_stop_string_is_a_part_of_the_text(server: Server) -> None:
    body = {"model": "tiny", "prompt": "df", "max_tokens": 30, "temperature": 0.3, "seed": 3}
    _, answer = ask(server, "/v1/completions", body)
    text = answer["choices"][0]["text"]
    stop = next(letter for letter in text if text.count(letter) > 1)
    first = text.index(stop)
    _, answer = ask(server, "/v1/completions", body | {"stop": stop, "min_tokens": first + 1})
    assert answer["choices"][0]["text"] == text[: text.index(stop, first + 1)]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_text_that_is_not_unicode_is_refused(server: Server) -> None:
    status, answer = ask(server, "/v1/completions", {"prompt": "a\ud83d"})
    assert (status, "prompt must be valid Unicode" in answer["error"]["message"]) == (400, True)


def test_a_server_reports_its_model_and_its_health(server: Server) -> None:
    with urllib.request.urlopen(server.url + "/v1/models", timeout=60) as response:
        (card,) = json.load(response)["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", NUM_POSITIONS)
    with urllib.request.urlopen(server.url + "/health", timeout=60) as response:
        assert response.status == 200


def test_only_those_with_the_key_are_served() -> None:
    with serving(api_key="secret") as (server, _):
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
        assert ask(server, GENERATE, body)[0] == 401
        assert ask(server, GENERATE, body, Authorization="Bearer wrong")[0] == 401
        assert ask(server, GENERATE, body, Authorization="Bearer \xff")[0] == 401
        assert ask(server, GENERATE, body, Authorization="Bearer secret")[0] == 200
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(server.url + "/v1/models", timeout=60)


def test_other_machines_are_served_with_a_key_only() -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0"):
        ServerSettings(host="0.0.0.0")
    assert ServerSettings(host="0.0.0.0", api_key="secret").host == "0.0.0.0"


def test_an_address_that_is_none_or_taken_is_refused(server: Server) -> None:
    with pytest.raises(ConfigError, match="an IP address, got 'localhost'"):
        ServerSettings(host="localhost")
    taken = server._socket.getsockname()[1]
    for host, port in (("127.0.0.1", taken), ("192.0.2.1", 0)):
        with pytest.raises(ConfigError, match=f"on port {port} of {host}"):
            Server(
                server._sampler,
                model="tiny",
                num_positions=1,
                settings=ServerSettings(host=host, port=port, api_key="secret"),
            )


def test_a_body_is_bounded_in_size_and_time() -> None:
    with serving(max_body_bytes=1000, body_timeout_s=0.2) as (server, _):
        assert ask(server, GENERATE, {"token_ids": [1] * 2000})[0] == 413
        with socket.create_connection(server._socket.getsockname()) as half:
            half.sendall(f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
            half.settimeout(30)
            assert b" 408 " in half.recv(1000)
        assert ask(server, GENERATE, {"token_ids": [1], "sampling_params": {"max_tokens": 1}})[0] == 200


class Slow(ScriptedEngine):
    """Engine that takes seconds for requests that the test chooses."""

    def __init__(self) -> None:
        super().__init__(lambda _request: [1] * 60, max_batch=8)

    def step(self) -> list[Any]:
        time.sleep(0.2)
        return super().step()


def test_a_client_that_leaves_aborts_its_call() -> None:
    engine = Slow()
    with serving(engine) as (server, host):
        body = json.dumps({"token_ids": [1], "sampling_params": {"max_tokens": 60, "n": 3}}).encode()
        with socket.create_connection(server._socket.getsockname()) as leaving:
            head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            leaving.sendall(head + body)
            wait_for(lambda: engine.num_unfinished == 3)
        wait_for(lambda: host.is_waiting)
    assert engine.num_unfinished == 0
    assert engine.stats.num_sampled < 3 * 60


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_an_error_of_the_engine_reaches_its_callers() -> None:
    class Broken(ScriptedEngine):
        def step(self) -> list[Any]:
            raise RuntimeError("out of memory")

    with serving(Broken(lambda _request: [1], max_batch=1)) as (server, _):
        status, answer = ask(server, GENERATE, {"token_ids": [1], "sampling_params": {"max_tokens": 1}})
    assert (status, answer["error"]["message"]) == (500, "RuntimeError: out of memory")


def test_a_thousand_clients_at_once_are_all_answered() -> None:
    num_clients = 1024

    async def ask_all(url: str) -> list[list[int]]:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def one(i: int) -> list[int]:
                body = {"token_ids": [1 + i], "sampling_params": {"max_tokens": 2}}
                async with session.post(url + GENERATE, json=body) as response:
                    assert response.status == 200
                    return (await response.json())["choices"][0]["token_ids"]

            return await asyncio.gather(*(one(i) for i in range(num_clients)))

    engine = ScriptedEngine(lambda request: [int(request.prompt[0])] * 2, max_batch=256)
    with serving(engine) as (server, _):
        assert asyncio.run(ask_all(server.url)) == [[1 + i] * 2 for i in range(num_clients)]


def test_weights_change_while_it_serves_and_answers_name_their_version() -> None:
    engine = make_engine()
    with serving(engine) as (server, host):
        assert generate(server, [3, 5])[0]["policy_versions"] == [0] * 8
        host.run(lambda: engine.update_weights(4))
        assert generate(server, [3, 5])[0]["policy_versions"] == [4] * 8
