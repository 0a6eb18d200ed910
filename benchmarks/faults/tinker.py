"""Kills of `treering serve --train` and of its clients, and wrong bodies. Clients speak Tinker's protocol themselves.

Needs `treering[tinker]`; without it these cases are left out.
"""

import gc
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPException
from importlib.util import find_spec
from itertools import count
from random import Random
from typing import Any

import numpy as np
import torch

from benchmarks.faults.cases import Case, Kind
from benchmarks.faults.judge import Verdict, failure, trouble_of
from benchmarks.faults.serving import start
from treering.cli.models import load_checkpoint
from treering.cli.run_eval import find_weights
from treering.engine.host import EngineHost
from treering.engine.torch_engine import TorchEngine
from treering.rl.model_samplers import EngineOptions

HAS_TINKER = find_spec("tinker") is not None
NUM_STEPS = 5
NUM_BODIES = 1000
_NAME, _NUM_POSITIONS = "tiny", 64
_PROMPT = [3, 5, 7, 2]
_PATIENCE_S = 30.0
_BROKEN = (OSError, HTTPException, ValueError, KeyError)
"""Errors of a client whose server was killed."""


def ask(url: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """Status and body of an answer; a GET without a body."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/{path}", data), timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


class Client:
    """A client of one model, which asks one request after another."""

    def __init__(self, url: str, path: str | None = None) -> None:
        """Trains a new model, or the one that was saved at a path, with its optimizer."""
        self.url = f"{url}/api/v1"
        session = json.loads(ask(self.url, "create_session", {"sdk_version": "0.38.0"})[1])
        self.session = {"session_id": session["session_id"], "model_seq_id": 0}
        if path is None:
            body: dict[str, Any] = {"base_model": _NAME, "lora_config": {"rank": 4, "seed": 1}}
            self.model = self._done("create_model", self.session | body)["model_id"]
        else:
            self.model = self._done("load_weights", self.session | {"path": path, "optimizer": True})["model_id"]
        self._numbers, self._samplers = count(1), count()

    def step(self) -> float:
        """Trains on two sequences; the loss before it."""
        from tinker.proto.tinker_public_pb2 import DTYPE_FLOAT32, DTYPE_INT64, ForwardBackwardOutput
        from tinker.proto.tinker_public_pb2 import ForwardBackwardRequest as Record

        record = Record(model_id=self.model, seq_id=next(self._numbers), loss_fn="cross_entropy")
        for tokens in ([*_PROMPT, 1, 4], [*_PROMPT, 6]):
            datum = record.data.add()
            datum.model_input.add().encoded_text.tokens = np.array(tokens[:-1], np.int32).tobytes()
            for name, values, dtype in (
                ("target_tokens", np.array(tokens[1:], np.int64), DTYPE_INT64),
                ("weights", np.ones(len(tokens) - 1, np.float32), DTYPE_FLOAT32),
            ):
                field = datum.loss_fn_inputs[name]
                field.dense, field.dtype = values.tobytes(), dtype
                field.shape.append(values.size)
        loss = float(ForwardBackwardOutput.FromString(self._answer("forward_backward", record.SerializeToString()))
                     .metrics["loss:sum"])  # fmt: skip
        self._done("optim_step", self._next() | {"adam_params": {"learning_rate": 1e-2}})
        return loss

    def save(self, number: int) -> None:
        """Saves the state after a step."""
        self._done("save_weights", self._next() | {"path": f"step-{number}"})

    def sample(self) -> bytes:
        """The record of two samples of the present weights, with a seed."""
        number = next(self._samplers)
        made = self._done("save_weights_for_sampler", self._next() | {"sampling_session_seq_id": number})
        return self._answer("asample", {
            "sampling_session_id": made["sampling_session_id"], "num_samples": 2,
            "prompt": {"chunks": [{"tokens": _PROMPT}]}, "sampling_params": {"max_tokens": 16, "seed": 3},
        })  # fmt: skip

    def stats(self) -> dict[str, Any]:
        """The counts of the server."""
        return dict(json.loads(ask(self.url, "treering/stats")[1]))

    def _next(self) -> dict[str, Any]:
        return {"model_id": self.model, "seq_id": next(self._numbers)}

    def _done(self, path: str, body: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._answer(path, body))
        if "error" in found:
            raise ValueError(f"{path} failed: {found['error']}")
        return found

    def _answer(self, path: str, body: Any) -> bytes:
        status, ticket = ask(self.url, path, body)
        if status != 200:
            raise ValueError(f"{path} was refused: {ticket!r}")
        wanted, status = {"request_id": json.loads(ticket)["request_id"]}, 408
        while status == 408:
            status, found = ask(self.url, "retrieve_future", wanted)
        return found


def _undisturbed(case: Case) -> tuple[list[float], bytes]:
    """The losses of a client's steps and its samples after them, measured by the first case that needs them."""
    file = case.folder.parent / "tinker.json"
    if not file.exists():
        with _opened(case) as url:
            client = Client(url)
            losses = [client.step() for _ in range(NUM_STEPS)]
            file.write_text(json.dumps({"losses": losses, "sample": client.sample().hex()}))
    found = json.loads(file.read_text())
    return found["losses"], bytes.fromhex(found["sample"])


def _save(client: Client) -> None:
    for number in range(NUM_STEPS + 1, 100):
        client.save(number)


def _step(client: Client) -> None:
    while True:
        client.step()


def _sample(client: Client) -> None:
    while True:
        client.sample()


def _server_killed(case: Case, does: Callable[[Client], None]) -> Verdict:
    """Killed at a random moment; another server has every finished save, and the newest goes on as if nothing was."""
    losses, sample = _undisturbed(case)
    command = ["--train", "--served-name", _NAME, "--checkpoints", str(case.folder / "saved")]
    run, url = start(case, *command)
    num_before = case.random.randrange(1, NUM_STEPS)
    try:
        client = Client(url)
        for number in range(num_before):
            client.step()
            client.save(number + 1)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(does, client)
            time.sleep(case.random.uniform(0.0, 0.2))
            run.kill()
            error = asked.exception()
    finally:
        run.kill()
        ended = run.end()
    if (trouble := trouble_of(case.run, ended)) is not None or not isinstance(error, _BROKEN):
        return failure(trouble or f"the client met {error!r}")
    again, url = start(case, *command)
    try:
        saved = json.loads(ask(f"{url}/api/v1", "checkpoints")[1])["checkpoints"]
        steps = {int(each["tinker_path"].rpartition("-")[2]): each["tinker_path"] for each in saved}
        if not set(range(1, num_before + 1)) <= steps.keys():
            return failure(f"{num_before} states were saved, and {sorted(steps)} are there")
        # States saved while it was killed are those of the last step.
        resumed = Client(url, steps[max(steps)])
        found = [resumed.step() for _ in range(num_before, NUM_STEPS)]
        if found != losses[num_before:] or resumed.sample() != sample:
            return failure(f"after {num_before} steps the losses were {found}, not {losses[num_before:]}")
    finally:
        again.kill()
        again.end()
    return Verdict(ending="same weights", is_bitwise=True, words=f"{len(steps)} states")


def _client_killed(case: Case) -> Verdict:
    """A client's process is killed; what it held is freed, and another client trains as if nothing was."""
    from treering.serving.tinker.sessions import TrainedModel

    losses, sample = _undisturbed(case)
    reading, writing = os.pipe()
    # Forked before the server's threads start.
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            url = os.read(reading, 1000).decode()
            _work(url)
        os._exit(0)
    # Models of earlier cases refer to themselves, and are counted until they are collected.
    gc.collect()
    try:
        with _opened(case, session_timeout_s=5.0) as url:
            client = Client(url)
            os.write(writing, url.encode())
            found = [client.step()]
            deadline = time.monotonic() + _PATIENCE_S
            while client.stats()["sessions"] < 2:
                if time.monotonic() > deadline:
                    return failure("the client that is killed never came")
                time.sleep(0.05)
            time.sleep(case.random.uniform(0.0, 0.5))
            os.kill(child, signal.SIGKILL)
            found += [client.step() for _ in range(1, NUM_STEPS)]
            if found != losses or client.sample() != sample:
                return failure(f"the other client's losses were {found}, not {losses}")
            deadline = time.monotonic() + _PATIENCE_S
            while (held := _held(client, TrainedModel)) != (1, 1, 1) and time.monotonic() < deadline:
                time.sleep(0.1)
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
    if held != (1, 1, 1):
        return failure(f"sessions, models and engines after its death: {held}")
    return Verdict(ending="same weights", is_bitwise=True)


def _work(url: str) -> None:
    client = Client(url)
    for number in count():
        client.step()
        client.save(number)
        client.sample()


def _held(client: Client, model_type: type) -> tuple[int, int, int]:
    """Open sessions, models in memory, and engines."""
    ask(client.url, "session_heartbeat", client.session)
    stats = client.stats()
    return (
        stats["sessions"],
        sum(type(each) is model_type for each in gc.get_objects()),
        stats["sampling"]["engines"],
    )


JUNK = (None, True, -1, 2**70, 1e308, float("nan"), "", "x", "\ud800", "tinker://x", [], [None], ["a"], {}, {"a": 1})


def damaged(random: Random, body: Any, path: tuple[Any, ...] = ()) -> tuple[Any, tuple[Any, ...]]:
    """A copy of a JSON value in which one part is another value, or missing; and where."""
    if not isinstance(body, dict | list) or not body or (path and random.random() < 0.1):
        return random.choice(JUNK), path
    keys = list(body) if isinstance(body, dict) else list(range(len(body)))
    key, changed = random.choice(keys), body.copy()
    if random.random() < 0.2:
        del changed[key]
        return changed, (*path, key)
    changed[key], where = damaged(random, body[key], (*path, key))
    return changed, where


def bodies_of(client: Client) -> list[tuple[str, dict[str, Any]]]:
    """A right body of each route, which names nothing that does not exist."""
    model, session = client.model, client.session["session_id"]
    saved = f"tinker://{model}/weights/step-1"
    sampling = {"max_tokens": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "seed": 3, "stop": [6]}
    plain = {"max_tokens": 2, "temperature": 1.0, "logprobs": 2, "min_tokens": 1, "stop_token_ids": [3], "seed": 1}
    adam = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8}
    tinker = {
        "create_session": {"sdk_version": "0.38.0", "user_metadata": {"a": "b"}},
        "create_model": {"session_id": session, "base_model": _NAME, "lora_config": {"rank": 2, "seed": 1}},
        "optim_step": {"model_id": model, "adam_params": adam},
        "save_weights": {"model_id": model, "path": "x", "ttl_seconds": 5, "overwrite": True},
        "save_weights_for_sampler": {"model_id": model, "path": "x", "kind": "snapshot"},
        "load_weights": {"model_id": model, "path": saved, "optimizer": True},
        "create_sampling_session": {"session_id": session, "base_model": _NAME},
        "asample": {
            "base_model": _NAME,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": _PROMPT}]},
            "sampling_params": sampling,
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 1,
            "target_prompt_logprobs": {"data": [3, 4, 5], "shape": [3, 1], "dtype": "int64"},
        },
        "weights_info": {"tinker_path": saved},
    }
    return [
        *((f"api/v1/{path}", body) for path, body in tinker.items()),
        ("inference/v1/generate", {"model": _NAME, "token_ids": _PROMPT, "sampling_params": plain}),
        ("inference/v1/generate", {"token_ids": _PROMPT, "cache_salt": "q|0|1", "sampling_params": plain}),
    ]


def _wrong_bodies(case: Case) -> Verdict:
    """Each of a thousand damaged bodies is answered, or refused with the name of its field, and the client goes on."""
    losses, sample = _undisturbed(case)
    with _opened(case, max_sessions=10**4, max_models=10**4) as url:
        client = Client(url)
        found = [client.step()]
        client.save(1)
        bodies, num_refused = bodies_of(Client(url)), 0
        for _ in range(NUM_BODIES):
            path, whole = case.random.choice(bodies)
            body, where = damaged(case.random, whole)
            status, answer = ask(url, path, body)
            message = answer.decode(errors="replace")
            if status == 200 and b"request_id" in answer and path != "api/v1/asample":
                status, answer = ask(url, "api/v1/retrieve_future", {"request_id": json.loads(answer)["request_id"]})
                if b'"server"' in answer:
                    return failure(f"{path} {body}: {answer!r}")
            elif status not in (200, 400, 404):
                return failure(f"{path} {body}: {status} {message}")
            elif status == 400:
                num_refused += 1
                if not any(isinstance(key, str) and key.split("_")[0] in message for key in where):
                    return failure(f"{path} {where}: {message} does not name the field")
        found += [client.step() for _ in range(1, NUM_STEPS)]
        if found != losses or client.sample() != sample:
            return failure(f"the client's losses after them were {found}, not {losses}")
    return Verdict(ending="same weights", is_bitwise=True, words=f"{num_refused} of {NUM_BODIES} were refused")


@contextmanager
def _opened(case: Case, **options: Any) -> Iterator[str]:
    """A server in this process, of the undisturbed run's model; its address."""
    from treering.serving import HostSampler, Server, ServerSettings
    from treering.serving.tinker.routes import TinkerOptions, TinkerRoutes

    torch.set_num_threads(1)
    model = load_checkpoint(find_weights(str(case.task.whole), None)).eval().requires_grad_(False)
    engine = EngineOptions(max_batch=8, max_tokens=512)
    limits = TinkerOptions(
        folder=case.folder / "held", num_positions=_NUM_POSITIONS, engine=engine, log=lambda _: None, **options
    )
    with EngineHost(TorchEngine(model, max_batch=8, max_tokens=512, costs="none")) as host:
        routes = TinkerRoutes(model, _NAME, limits, host)
        with Server(
            HostSampler(host),
            model=_NAME,
            num_positions=_NUM_POSITIONS,
            settings=ServerSettings(port=0),
            more=routes,
        ) as server:
            yield server.url


TINKER = (
    *(
        Kind(name="a Tinker server is killed", detail=detail, happen=partial(_server_killed, does=does))
        for detail, does in (("while it saves", _save), ("in optim_step", _step), ("while it samples", _sample))
    ),
    Kind(name="a Tinker client is killed", detail="at a random moment", happen=_client_killed),
    Kind(name="wrong bodies for a Tinker server", detail="a thousand", happen=_wrong_bodies),
)
