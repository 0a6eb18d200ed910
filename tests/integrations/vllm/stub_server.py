"""HTTP server with the routes of vLLM that TRL calls, for tests of what is asked and when."""

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

from tests.integrations.vllm.llms import EXTENSION, VOCAB
from treering.integrations.vllm.vllm_settings import PROPOSER, read_request_args

NUM_STABLE, NUM_EARLY = 4, 6
"""Tokens that no update changes, and tokens that a request has when it is ended."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request for one rollout."""

    prompt: tuple[int, ...]
    seed: int
    is_early: bool
    rehearsed: list[int]

    @property
    def rollout(self) -> tuple[tuple[int, ...], int]:
        return self.prompt, self.seed


class StubServer(ThreadingHTTPServer):
    """Server whose early requests run until they are ended.

    A token is a hash of the prompt, the seed, its position and, after the stable ones, the version of the weights.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, history: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.history, self.version = history, 0
        self.asked: list[Asked] = []
        self.running: dict[str, Event] = {}
        self.fails_early = self.ignores_ends = self.has_no_ends = False
        self.num_counted_early = 0
        """Counts of rows and drafts that were asked for while early requests ran."""

    def tokens(self, rollout: tuple[tuple[int, ...], int], num_tokens: int) -> list[int]:
        changing = [0 if at < NUM_STABLE else self.version for at in range(num_tokens)]
        return [2 + zlib.crc32(repr((rollout, at, v)).encode()) % (VOCAB - 2) for at, v in enumerate(changing)]

    def info(self) -> dict[str, Any]:
        config = {
            "speculative_config": {"model": PROPOSER},
            "parallel_config": {"worker_extension_cls": EXTENSION},
            "model_config": {"logprobs_mode": "processed_logprobs"},
            "weight_transfer_config": {},
        }
        return {"vllm_config": config, "data": [{"id": "policy"}]}

    def call(self, method: str) -> Any:
        self.num_counted_early += bool(self.running)
        counts = dict.fromkeys(("num_rows", "num_drafted", "num_accepted"), 0)
        return {"treering_stats": {"history": str(self.history), **counts}}.get(method)

    def complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        if isinstance(body["prompt"][0], list):  # TRL's own request for a batch
            return [self._choice((*prompt,), at, body) for prompt in body["prompt"] for at in range(body["n"])]
        return [self._choice((*body["prompt"],), body["seed"], body)]

    def _choice(self, prompt: tuple[int, ...], seed: int, body: dict[str, Any]) -> dict[str, Any]:
        name = body.get("request_id")
        identity = read_request_args(body.get("vllm_xargs"))
        rehearsed = [] if identity is None else [*identity.rehearsed]
        one = Asked(prompt=prompt, seed=seed, is_early=name is not None, rehearsed=rehearsed)
        self.asked.append(one)
        num_tokens, reason = body["max_tokens"], "length"
        if name is not None:
            ended = self.running.setdefault(f"cmpl-{name}-0", Event())
            if self.fails_early:
                raise OSError
            if ended.wait(20.0):
                num_tokens, reason = NUM_EARLY, "abort"
        tokens = self.tokens(one.rollout, num_tokens)
        names = [f"token_id:{token}" for token in tokens]
        logprobs = {"tokens": names, "token_logprobs": [-1.0] * len(tokens), "top_logprobs": [None] * len(tokens)}
        return {
            "prompt_token_ids": [*prompt],
            "token_ids": tokens,
            "logprobs": logprobs if body["logprobs"] is not None else None,
            "finish_reason": reason,
        }


class _Handler(BaseHTTPRequestHandler):
    server: StubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self._answer(200, self.server.info())

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(text) if text else {}
        if self.path == "/collective_rpc":
            self._answer(200, {"results": [self.server.call(body["method"])]})
        elif self.path == "/abort_requests" and not self.server.has_no_ends:
            for name in () if self.server.ignores_ends else body["request_ids"]:
                if name in self.server.running:
                    self.server.running[name].set()
            self._answer(200, {})
        elif self.path == "/v1/completions":
            try:
                self._answer(200, {"choices": self.server.complete(body)})
            except OSError:
                self._answer(500, {})
        else:
            self._answer(200 if self.path == "/reset_prefix_cache" else 404, {"success": True})

    def _answer(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def stub_server(history: Path) -> Iterator[StubServer]:
    """Yield a running server that says it drafts from `history`."""
    with StubServer(history) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
