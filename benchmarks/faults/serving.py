"""Kills of `treering serve` while clients ask it: each client gets its whole answer or an error, and asks again."""

import json
import signal
import socket
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from http.client import HTTPException
from pathlib import Path

from benchmarks.faults.cases import Case, Kind
from benchmarks.faults.judge import Verdict, failure, trouble_of
from benchmarks.faults.runs import Run

_NUM_CLIENTS = 8
_NUM_QUESTIONS = 24
_READY_S = 60.0
_POLL_S = 0.05


def _killed(case: Case, number: signal.Signals) -> Verdict:
    """Clients ask while the server is ended, and again of a new one, which gives the same answers."""
    server, url = start(case)
    try:
        with ThreadPoolExecutor(_NUM_CLIENTS) as clients:
            asked = [clients.submit(_ask, url, question) for question in range(_NUM_QUESTIONS)]
            time.sleep(case.random.uniform(0.0, 1.0))
            server.send(number)
            before = [_answer(one) for one in asked]
    finally:
        server.kill()
        ended = server.end()
    if (trouble := trouble_of(case.run, ended)) is not None:
        return failure(trouble)
    again, url = start(case)
    try:
        after = [_ask(url, question) for question in range(_NUM_QUESTIONS)]
    finally:
        again.kill()
        again.end()
    wrong = [question for question, one in enumerate(before) if one not in (None, after[question])]
    if wrong:
        return failure(f"question {wrong[0]} was answered by {before[wrong[0]]}, and is by {after[wrong[0]]}")
    num_answered = sum(one is not None for one in before)
    return Verdict(ending="same weights", is_bitwise=True, words=f"{num_answered} answered before the end")


def start(case: Case, *options: str) -> tuple[Run, str]:
    """A server of the undisturbed run, once it answers, and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = case.server.start(["serve", str(case.task.whole), "--port", str(port), "--max-tokens", "64", *options])
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _READY_S
    while Path(f"/proc/{run.pid}").exists() and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return run, url
        except OSError:
            time.sleep(_POLL_S)
    run.kill()
    raise ValueError(f"the server did not come up: {run.end().stderr[-200:]!r}")


def _ask(url: str, question: int) -> list[int]:
    """The tokens after a context, with a seed, so that the same question has the same answer."""
    body = {
        "token_ids": [3, 5, question % 7 + 1],
        "sampling_params": {"max_tokens": 32, "temperature": 1.0, "seed": question},
    }
    request = urllib.request.Request(f"{url}/inference/v1/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        tokens: list[int] = json.load(response)["choices"][0]["token_ids"]
    return tokens


def _answer(asked: "Future[list[int]]") -> list[int] | None:
    """An answer, or None where the connection broke; half an answer is neither."""
    try:
        return asked.result()
    except (OSError, HTTPException):
        return None


SERVERS = tuple(
    Kind(name="a server that clients ask is ended", detail=number.name, happen=partial(_killed, number=number))
    for number in (signal.SIGKILL, signal.SIGTERM)
)
"""Runs of `treering serve`."""
