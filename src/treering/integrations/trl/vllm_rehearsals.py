"""Rehearsals in TRL: its vLLM server samples the next batch early, while the trainer trains.

Each rollout has its own seed, given by its place in the run. So tokens that were sampled early, under earlier weights,
are its draft: the server draws them again with the same noise and keeps those that stay.
"""

import copy
import inspect
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple

import numpy as np
import requests
from requests.adapters import HTTPAdapter
from transformers import TrainerCallback
from trl.generation import vllm_client
from trl.trainer import utils

from treering.engine.kv_cache import count_common
from treering.errors import ConfigError, UnsupportedError
from treering.integrations.trl.prompt_order import PromptOrder
from treering.integrations.trl.trl_trainers import Overrides
from treering.integrations.vllm.llm_requests import noise_seed
from treering.integrations.vllm.vllm_settings import KEY, request_args
from treering.metrics import REHEARSAL_KEPT, REHEARSED

MAX_CONNECTIONS = 512
"""Most requests of a batch that the server has at a time."""
_END_S = 10.0
"""Longest wait for rehearsals to end."""

_log = logging.getLogger(__name__)


def check_rehearsals(trainer: Any, generation: Any) -> None:
    """Refuse trainers and settings whose next batch cannot be sampled early.

    Args:
        trainer: a TRL trainer.
        generation: its `VLLMGeneration`, before vLLM has started.

    Raises:
        ConfigError: names what is set and what works.
        UnsupportedError: a TRL without the methods that are replaced.
    """
    if generation.mode != "server":
        raise ConfigError(
            f'rehearse=True samples while the trainer uses its device, got vllm_mode="{generation.mode}"; set '
            'vllm_mode="server", or rehearse=False'
        )
    taken = [name for name in ("seed", "n") if name in generation.generation_kwargs]
    if taken:
        raise ConfigError(
            f"rehearse=True gives each rollout its own request and seed, got {' and '.join(taken)} in "
            "generation_kwargs; remove them, or set rehearse=False"
        )
    made = [name for name in ("rollout_func", "environment_factories") if getattr(trainer, name, None) is not None]
    if made:
        raise ConfigError(
            f"rehearse=True takes the next prompts from the dataset, but {made[0].replace('_factories', '_factory')} "
            "makes them; set rehearse=False"
        )
    if trainer.train_dataset is not None and not hasattr(trainer.train_dataset, "__len__"):
        raise ConfigError(
            "rehearse=True needs the next prompts before they are read, got an IterableDataset; pass a Dataset, or set "
            "rehearse=False"
        )
    needed = [(trainer, name) for name in ("_generate", "_tokenize_prompts", "_get_train_sampler", "num_iterations")]
    needed += [(vllm_client, "parse_logprobs"), (utils, "RepeatSampler")]
    missing = [name for owner, name in needed if not hasattr(owner, name)]
    if missing:
        raise UnsupportedError(
            f"rehearse=True is written for TRL 1.16, but this one has no {', '.join(missing)}; install that version, "
            "or set rehearse=False"
        )


class Place(NamedTuple):
    """Place of a batch in a run, from which the seeds of its rollouts follow."""

    mode: str  # "train" or "eval"
    step: int  # the trainer's global_step
    number: int  # batches of the mode at this step before


RolloutSeed = tuple[tuple[int, ...], int]
"""Tokens of a prompt, and the seed of a rollout."""


class EarlyRequests:
    """Requests of a batch on the server, in threads that do not keep the process alive."""

    def __init__(self, address: str, bodies: Mapping[RolloutSeed, dict[str, Any]]) -> None:
        """Send the requests to the server at `address`."""
        self._address, self._tokens = address, dict[RolloutSeed, list[int]]()
        self._ids: list[str] = []
        self._errors: list[Exception] = []
        self._is_ending = Event()
        self._waiting: SimpleQueue[tuple[RolloutSeed, dict[str, Any]]] = SimpleQueue()
        for rollout, body in bodies.items():
            name = f"rehearsal-{uuid.uuid4().hex}"
            # vLLM's own name of the request.
            self._ids.append(f"cmpl-{name}-0")
            self._waiting.put((rollout, body | {"request_id": name}))
        self._threads = [Thread(target=self._send, daemon=True) for _ in range(min(len(bodies), MAX_CONNECTIONS))]
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        while not self._is_ending.is_set():
            try:
                rollout, body = self._waiting.get_nowait()
            except Empty:
                return
            try:
                answer = requests.post(f"{self._address}/v1/completions", json=body)
                answer.raise_for_status()
                self._tokens[rollout] = answer.json()["choices"][0]["token_ids"]
            except Exception as error:
                self._errors.append(error)

    def end(self) -> dict[RolloutSeed, list[int]]:
        """End the requests, wait until the server has none of them, and return the tokens of each rollout.

        Failed requests have no tokens and are logged.
        """
        self._is_ending.set()
        deadline = time.monotonic() + _END_S
        while (running := [thread for thread in self._threads if thread.is_alive()]) and time.monotonic() < deadline:
            # A request that the server gets after this is in the next round.
            try:
                abort(self._address, self._ids)
            except requests.RequestException as error:
                self._errors.append(error)
            running[0].join(0.05)
        tokens = {rollout: tokens for rollout, tokens in self._tokens.copy().items() if tokens}
        if running or self._errors:
            _log.warning(
                "rehearsals of %d of %d rollouts were lost, %d still run (%s); their rollouts are sampled without",
                *(len(self._ids) - len(tokens), len(self._ids), len(running)),
                self._errors[0] if self._errors else f"no end within {_END_S:g} s",
            )
        return tokens


def abort(address: str, ids: Sequence[str]) -> None:
    """Make a vLLM server end requests with the tokens that they have; unknown ids are ignored.

    Raises:
        requests.RequestException: the server does not answer, or has no such route.
    """
    requests.post(f"{address}/abort_requests", json={"request_ids": [*ids]}, timeout=_END_S).raise_for_status()


class RehearsedBatches:
    """Sampling of a trainer's batches with a seed for each rollout, and early sampling of the next batch.

    Lives in the main process, which sends the requests of all.
    """

    def __init__(self, trainer: Any, generation: Any) -> None:
        """Replace how the trainer's batches are sampled from now on.

        Raises:
            UnsupportedError: the server cannot end requests.
        """
        self._trainer, self._client = trainer, generation.vllm_client
        try:
            abort(self._client.base_url, ["none"])
        except requests.RequestException as error:
            raise UnsupportedError(
                f"rehearse=True needs a vLLM server that can end requests, as vLLM 0.32 can with "
                f"VLLM_SERVER_DEV_MODE=1, but {self._client.base_url} answered {error}; set rehearse=False"
            ) from error
        retries = self._client.session.get_adapter(self._client.base_url).max_retries
        self._client.session.mount(
            self._client.base_url, HTTPAdapter(max_retries=retries, pool_maxsize=MAX_CONNECTIONS)
        )
        self._order: PromptOrder | None = None
        self._dataset: Any = None
        self._places: dict[str, Place] = {}
        self._running: EarlyRequests | None = None
        self._early: dict[RolloutSeed, list[int]] = {}
        self._forget_batch()
        Overrides(trainer).replace("_get_train_sampler", self._take_order)
        Overrides(trainer).replace("_generate", self._sample_batch)
        Overrides(self._client).replace("generate", self._sample)
        Overrides(generation).replace("sync_weights", self._sync_weights)
        trainer.add_callback(_EndOfTraining(self))

    def end(self) -> None:
        """End what runs early, and keep its tokens for the next batch."""
        if self._running is not None:
            self._early, self._running = self._running.end(), None

    def _sync_weights(self, original: Callable[[], None]) -> None:
        self.end()
        original()

    def _take_order(self, original: Callable[..., Any], dataset: Any = None) -> Any:
        # A second sampler with the same seed leaves the trainer's as it is.
        sampler, twin = original(dataset), original(dataset)
        if type(twin) is not utils.RepeatSampler:
            raise UnsupportedError(
                f"rehearse=True needs the next prompts from TRL's RepeatSampler, got {type(twin).__name__}; remove the "
                "trainer's _get_train_sampler, or set rehearse=False"
            )
        self._order, self._dataset = PromptOrder(twin), self._trainer.train_dataset if dataset is None else dataset
        return sampler

    def _forget_batch(self) -> None:
        self._place: Place | None = None
        self._num_calls = 0
        self._first_call: tuple[dict[str, Any], int] | None = None

    def _sample_batch(self, original: Callable[..., Any], prompts: list[Any]) -> Any:
        self.end()
        mode = "train" if self._trainer.model.training else "eval"
        self._place = self._places[mode] = self._place_at(mode, self._trainer.state.global_step)
        batch = original(prompts)
        if mode == "train":
            self._early = {}
            self._begin_next(prompts)
        self._forget_batch()
        return batch

    def _place_at(self, mode: str, step: int) -> Place:
        """Return the place of the mode's next batch, if it is sampled at this step."""
        before = self._places.get(mode)
        return Place(mode, step, before.number + 1 if before is not None and before.step == step else 0)

    def _seed(self, place: Place, call: int, row: int) -> int:
        return noise_seed(self._trainer.args.seed, (*place, call, row), 0)

    def _begin_next(self, prompts: Sequence[Any]) -> None:
        """Send the rollouts of the next batch, if its prompts are known and training goes on until then."""
        trainer = self._trainer
        if self._order is None or self._first_call is None:
            return
        body, num_rollouts = self._first_call
        own = prompts[::num_rollouts]
        found = self._order.following(
            lambda batch: all(self._prompt(at) == prompt for at, prompt in zip(batch, own, strict=False)),
            num_passes=trainer.args.steps_per_generation * trainer.num_iterations,
            passes_per_update=trainer.args.gradient_accumulation_steps,
        )
        if found is None:
            _log.warning("the prompts of a batch are not in the dataset's order; the next batches are not rehearsed")
            self._order = None
            return
        step = trainer.state.global_step + found[1]
        if step >= trainer.state.max_steps:
            return
        place = self._place_at("train", step)
        contexts = trainer._tokenize_prompts([copy.deepcopy(self._prompt(at)) for at in found[0]])[0]
        rollouts = self._rollouts(place, 0, contexts, num_rollouts)
        bodies = {rollout: _request(body | {"logprobs": None}, rollout) for rollout in rollouts}
        self._running = EarlyRequests(self._client.base_url, bodies)

    def _prompt(self, index: int) -> Any:
        return self._dataset[index]["prompt"]

    def _rollouts(
        self, place: Place, call: int, contexts: Iterable[Sequence[int]], num_rollouts: int
    ) -> list[RolloutSeed]:
        rows = [tuple(context) for context in contexts for _ in range(num_rollouts)]
        return [(context, self._seed(place, call, row)) for row, context in enumerate(rows)]

    def _sample(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Answer a call of TRL's client by a request for each rollout."""
        self.end()
        if self._place is None:
            return original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs)
        given.apply_defaults()
        contexts, features, num_rollouts, regex, others = (
            given.arguments.pop(name)
            for name in ("prompts", "features", "n", "structured_outputs_regex", "generation_kwargs")
        )
        if features is not None:
            raise ConfigError(
                "rehearse=True samples prompts of tokens, got a batch with images; create the trainer with "
                "rehearse=False"
            )
        structure = {} if regex is None else {"structured_outputs": {"regex": regex}}
        body = {
            "model": self._client.model,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **given.arguments,
            **structure,
            **(others or {}),
        }
        if self._first_call is None:
            self._first_call = body, num_rollouts
        rollouts = self._rollouts(self._place, self._num_calls, contexts, num_rollouts)
        self._num_calls += 1
        with ThreadPoolExecutor(min(len(rollouts), MAX_CONNECTIONS)) as pool:
            choices = [*pool.map(lambda rollout: self._sampled(body, rollout), rollouts)]
        self._log_kept(rollouts, choices)
        logprobs, logprob_token_ids = vllm_client.parse_logprobs([choice["logprobs"] for choice in choices])
        return {
            "prompt_ids": [choice["prompt_token_ids"] for choice in choices[::num_rollouts]],
            "completion_ids": [choice["token_ids"] for choice in choices],
            "logprobs": logprobs,
            "logprob_token_ids": logprob_token_ids,
        }

    def _sampled(self, body: dict[str, Any], rollout: RolloutSeed) -> dict[str, Any]:
        request = _request(body, rollout, self._early.get(rollout, ()))
        answer = self._client._post(f"{self._client.base_url}/v1/completions", json=request)
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    def _log_kept(self, rollouts: Sequence[RolloutSeed], choices: Sequence[dict[str, Any]]) -> None:
        """Log how much of what was sampled early stayed, in the first call of a batch of training."""
        if not self._early or self._num_calls > 1 or self._place is None or self._place.mode != "train":
            return
        num_kept = num_verified = 0
        for rollout, choice in zip(rollouts, choices, strict=True):
            early, tokens = (np.array(ids, np.int32) for ids in (self._early.get(rollout, ()), choice["token_ids"]))
            common = count_common(early, tokens)
            num_kept += common
            num_verified += min(early.size, tokens.size, common + 1)
        metrics = self._trainer._metrics["train"]
        metrics[REHEARSED].append(sum(map(len, self._early.values())))
        metrics[REHEARSAL_KEPT].append(num_kept / max(num_verified, 1))


def _request(body: dict[str, Any], rollout: RolloutSeed, early: Sequence[int] = ()) -> dict[str, Any]:
    """Return the body of a rollout's request, with the tokens that were sampled early."""
    context, seed = rollout
    made = {**body, "prompt": context, "n": 1, "seed": seed}
    if early:
        # Values of vllm_xargs are numbers and texts.
        text = json.dumps(request_args(None, rehearsed=early)[KEY])
        made["vllm_xargs"] = {**(body.get("vllm_xargs") or {}), KEY: text}
    return made


class _EndOfTraining(TrainerCallback):  # type: ignore[misc]
    def __init__(self, batches: RehearsedBatches) -> None:
        self._batches = batches

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._batches.end()
