"""Routes of Tinker's protocol under `/api/v1`: requests of clients, and the answers that they expect.

A request that computes is answered by a promise, named by the request's number, so that a repeated request runs once.
The client fetches the answer from `retrieve_future`.
"""

import asyncio
import gc
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from torch import nn

from treering.data.formats.json_fields import show
from treering.engine.host import EngineHost
from treering.engine.protocol import Sampling
from treering.errors import ConfigError, InputError, TreeringError, UnsupportedError
from treering.extras import require, satisfies
from treering.model.tree_model import TreeModel
from treering.rl.model_samplers import EngineOptions, SamplerPool, SamplerWeights
from treering.serving.bodies import Fields, logprobs_of, take_sampling
from treering.serving.server import Refusal, Server, refusal_of
from treering.serving.tinker.checkpoints import Checkpoints, SavedModel
from treering.serving.tinker.sessions import Holdings, TrainedModel
from treering.serving.tinker.training_thread import Job, TrainingThread
from treering.serving.tinker.wire import (
    MAX_CELLS,
    Sampled,
    read_batch,
    read_head,
    sample_answer,
    take_matrix,
    take_prompt_chunks,
)
from treering.train.loop.checkpoint import load_weights
from treering.train.loop.trainee import SharedBase, Trainee, TraineeOptions

if TYPE_CHECKING:
    from aiohttp import web

TESTED = ">=0.38,<0.39"
"""Supported releases of the client."""
POLL_S = 20.0
"""Longest time that a poll waits for an answer; clients give up after 45 s."""
_MAX_TTL_S = 10**9
_ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
_RUN = re.compile(r"[0-9a-f]{32}:train:\d{1,9}", re.ASCII)
T = TypeVar("T")
_Answer = Callable[[Fields], Awaitable[dict[str, Any] | bytes]]
_Start = Callable[[TrainedModel], dict[str, Any]]
_Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerOptions:
    """Limits of clients, and the folder of checkpoints."""

    folder: Path
    num_positions: int
    engine: EngineOptions
    stop_tokens: tuple[int, ...] = ()
    tokenizer: str | None = None
    """Folder or hub id that clients load their tokenizer from; None: the model's name."""
    max_tokens: int = 16_384
    """Distinct tokens that training computes at a time."""
    max_sessions: int = 64
    max_models: int = 16
    session_timeout_s: float = 120.0
    """Silence after which a session ends; clients send a heartbeat every 10 s."""
    shares: bool = True
    """Whether to compute shared prefixes once, also across queued requests; False computes each datum separately."""
    log: Callable[[str], None] = print
    """Called with a line at each optim_step."""


class TinkerRoutes:
    """Routes for the clients of one base model, for `treering.serving.Server`."""

    def __init__(self, model: Any, name: str, options: TinkerOptions, host: EngineHost) -> None:
        """Start the training thread; `host` has the engine of `model`, and must outlive the routes.

        Raises:
            MissingExtraError: the client's package or PEFT is not installed.
        """
        require("treering serve --train", "tinker")
        require("treering serve --train", "peft")
        self._options, self._base = options, SharedBase(model, name)
        self._vocab_size = TreeModel.of(model).vocab_size
        self._checkpoints = Checkpoints(options.folder)
        self._thread = TrainingThread(merges=options.shares)
        self._pool = SamplerPool(self._base, options.engine, host)
        self._held = Holdings(
            max_sessions=options.max_sessions, max_models=options.max_models, timeout_s=options.session_timeout_s
        )
        self._reaper: asyncio.Task[None] | None = None

    def routes(self, server: Server) -> "list[web.RouteDef]":
        """Return the routes that a server adds to its own."""
        from aiohttp import web

        root = "/api/v1/"

        def route(answer: Callable[..., Awaitable[Any]], *parts: Any) -> _Handler:
            async def respond(request: "web.Request") -> "web.Response":
                found = await answer(request, *parts)
                if not isinstance(found, bytes):
                    return web.json_response(found) if found is not None else web.Response(status=204)
                if not re.search(r"protobuf|\*/\*", accepted := request.headers.get("Accept", "*/*")):
                    raise Refusal(
                        406, f"this answer is in protobuf, got Accept: {accepted!r:.80}; accept application/x-protobuf"
                    )
                return web.Response(body=found, content_type="application/x-protobuf")

            return server.guarded(respond)

        async def body(request: "web.Request", answer: _Answer) -> dict[str, Any] | bytes:
            return await answer(Fields(await server.read_json(request), "the body"))

        async def path(request: "web.Request", answer: Callable[..., Any]) -> Any:
            return answer(*request.match_info.values())

        async def page(
            request: "web.Request", name: str, find: Callable[[], list[T]], card: Callable[[T], Any]
        ) -> dict[str, Any]:
            found = find()
            limit, offset = (_count(request.query, *each) for each in (("limit", len(found)), ("offset", 0)))
            cursor = {"limit": limit, "offset": offset, "total_count": len(found)}
            return {name: [card(each) for each in found[offset : offset + limit]], "cursor": cursor}

        async def forward_backward(request: "web.Request") -> dict[str, Any]:
            return self._forward_backward(await server.read_raw(request))

        posts = {
            "client/config": self._config,
            "client/dynamic_config": self._dynamic_config,
            "telemetry": self._telemetry,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "load_weights": self._load_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "cancel_future": self._cancel,
            "retrieve_future": self._retrieve,
            "weights_info": self._weights_info,
        }
        run = root + "training_runs/{run}"
        return [
            *(web.post(root + name, route(body, answer)) for name, answer in posts.items()),
            web.post(root + "forward_backward", route(forward_backward)),
            web.post(root + "sessions/{id}/finish", route(path, self._finish)),
            web.get(root + "sessions/{id}", route(path, self._get_session)),
            web.get(root + "healthz", route(path, lambda: {"status": "ok"})),
            web.get(root + "get_server_capabilities", route(path, self._capabilities)),
            web.get(root + "samplers/{id}", route(path, self._get_sampler)),
            web.get(root + "training_runs", route(page, "training_runs", self._runs, self._run)),
            web.get(root + "checkpoints", route(page, "checkpoints", lambda: self._saved("*"), SavedModel.card)),
            web.get(run, route(path, self._run)),
            web.get(run + "/checkpoints", route(path, self._list)),
            web.delete(run + "/checkpoints/{kind}/{name}", route(path, self._delete)),
            web.get(root + "treering/stats", route(path, self.stats)),
        ]

    async def close(self) -> None:
        """Stop training and sampling; open requests fail."""
        if self._reaper is not None:
            self._reaper.cancel()
        await asyncio.to_thread(self._thread.close)
        await self._pool.close()

    def stats(self) -> dict[str, Any]:
        """Return counts since the server started."""
        return {
            "sessions": len(self._held.sessions),
            "models": sum(len(each.models) for each in self._held.sessions.values()),
            "training": asdict(self._thread.counts),
            "sampling": self._pool.stats(),
        }

    async def _config(self, fields: Fields) -> dict[str, Any]:
        _check_release(fields)
        return {"use_pyqwest_transport": False, "parallel_fwdbwd_chunks": True}

    async def _dynamic_config(self, fields: Fields) -> dict[str, Any]:
        _check_release(fields)
        return {"sample_cancel_enabled": True}

    async def _telemetry(self, fields: Fields) -> dict[str, Any]:
        return {"status": "accepted"}

    def _capabilities(self) -> dict[str, Any]:
        card = {"model_name": self._base.name, "max_context_length": self._options.num_positions}
        return {"supported_models": [card | {"trainable": True, "sampleable": True}]}

    async def _create_session(self, fields: Fields) -> dict[str, Any]:
        _check_release(fields)
        session = self._held.open(fields.take("user_metadata", dict, {}))
        if self._reaper is None:
            self._reaper = asyncio.create_task(self._reap())
        return {"type": "create_session", "session_id": session.id}

    async def _heartbeat(self, fields: Fields) -> dict[str, Any]:
        self._held.session(fields.need("session_id", str))
        return {"type": "session_heartbeat"}

    def _finish(self, session_id: str) -> None:
        self._held.session(session_id).is_finished = True

    def _get_session(self, session_id: str) -> dict[str, Any]:
        session = self._held.session(session_id)
        return {
            "training_run_ids": list(session.models),
            "sampler_ids": list(session.samplers),
            "user_metadata": session.metadata,
        }

    async def _reap(self) -> None:
        """Free what clients held whose sessions have timed out."""
        while True:
            await asyncio.sleep(min(10.0, self._options.session_timeout_s / 4))
            ended = self._held.take_silent()
            for model_id in [model_id for session in ended for model_id in session.models]:
                self._thread.drop(model_id)
                await self._pool.drop(model_id)
            if ended:
                del ended
                named = (weights for session in self._held.sessions.values() for weights in session.samplers.values())
                await self._pool.keep({weights.owner for weights in named})
                # Models refer to themselves, so that nothing else frees them soon.
                gc.collect()

    async def _create_model(self, fields: Fields) -> dict[str, Any]:
        self._check_name(fields.need("base_model", str))
        lora = Fields(fields.take("lora_config", dict, {"rank": 0}), "lora_config")
        # A recipe that sends no seed repeats its run.
        seed = lora.take("seed", int, 0)
        names = ("train_mlp", "train_attn", "train_unembed")
        kinds = {name: lora.take(name, bool, True) for name in names}
        options = TraineeOptions(rank=lora.take("rank", int, 0), seed=seed, **kinds)
        lora.end()
        if not 0 <= options.rank <= 1024:
            raise InputError(f"rank of lora_config must lie in [0, 1024] (0 trains all weights), got {options.rank}")

        def create(model: TrainedModel) -> dict[str, Any]:
            model.trainee = self._trainee(options)
            return {"type": "create_model", "model_id": model.id}

        return self._add(fields, fields.need("session_id", str), lambda: (options, create))

    def _add(
        self, fields: Fields, session_id: str, plan: Callable[[], tuple[TraineeOptions, _Start]]
    ) -> dict[str, Any]:
        """Add a model with the planned options and start; a repeated request gets its promise again."""
        number = fields.take("model_seq_id", int, 0)
        if (known := self._held.promise(f"{session_id}:train:{number}:0")) is not None:
            return known.ticket()
        _check_adam(fields)
        options, start = plan()
        model = self._held.add_model(session_id, number, options, fields.take("user_metadata", dict, {}))
        job = Job(model_id=model.id, run=lambda: start(model))
        self._thread.submit(job)
        return self._held.give(f"{model.id}:0", asyncio.wrap_future(job.answer), model_id=model.id).ticket()

    def _trainee(self, options: TraineeOptions) -> Trainee:
        return Trainee(self._base, options, max_tokens=self._options.max_tokens, shares=self._options.shares)

    async def _get_info(self, fields: Fields) -> dict[str, Any]:
        model = self._held.model(fields.need("model_id", str))
        name, rank, arch = self._base.name, model.options.rank, str(self._base.model.config.model_type)
        return {
            "type": "get_info",
            "model_data": {"model_name": name, "tokenizer_id": self._options.tokenizer, "arch": arch},
            "model_id": model.id,
            "is_lora": rank > 0,
            "lora_rank": rank or None,
            "model_name": name,
        }

    def _in_order(self, model: TrainedModel, seq_id: int, make: Callable[[], Job]) -> dict[str, Any]:
        """Run a job after all earlier ones of its model; a repeated request gets its promise again."""
        name = f"{model.id}:{seq_id}"
        if seq_id and (known := self._held.promise(name)) is not None:
            return known.ticket()
        self._held.check_room(name)
        try:
            job = make()
        except TreeringError:
            # Later requests must not wait for a refused one.
            model.enqueue(self._thread, seq_id, None)
            raise
        model.enqueue(self._thread, seq_id, job)
        name = name if seq_id else f"{model.id}:{uuid.uuid4().hex}"
        return self._held.give(name, asyncio.wrap_future(job.answer), model_id=model.id).ticket()

    def _forward_backward(self, raw: bytes) -> dict[str, Any]:
        record = read_head(raw)
        model = self._held.model(record.model_id)

        def make() -> Job:
            batch = read_batch(record, num_positions=self._options.num_positions, vocab_size=self._vocab_size)
            return Job(model_id=model.id, batch=batch, trainee=model.ready, counts=model.counts)

        return self._in_order(model, record.seq_id, make)

    def _job(self, fields: Fields, make: Callable[[TrainedModel], Callable[[], Any]]) -> dict[str, Any]:
        """Run what a body asks of its model, in order."""
        model = self._held.model(fields.need("model_id", str))
        seq_id = fields.take("seq_id", int, 0)
        return self._in_order(model, seq_id, lambda: Job(model_id=model.id, run=make(model)))

    async def _optim_step(self, fields: Fields) -> dict[str, Any]:
        def make(model: TrainedModel) -> Callable[[], Any]:
            if fields.take("optimizer_params", dict, {}):
                raise UnsupportedError("optimizer_params of other optimizers are not supported; send AdamParams")
            adam = Fields(fields.need("adam_params", dict), "adam_params")
            params = {name: adam.take(name, float, default) for name, default in _ADAM.items()}
            adam.end()
            wrong = next((name for name, value in params.items() if value < 0), None)
            if wrong or max(params["beta1"], params["beta2"]) >= 1:
                raise InputError(f"adam_params must be at least 0 and betas below 1, got {params}")
            return lambda: self._step(model, params)

        return self._job(fields, make)

    def _step(self, model: TrainedModel, params: Mapping[str, float]) -> dict[str, Any]:
        norm = model.ready().step(params)
        model.num_steps += 1
        flat, computed = model.counts.flat_tokens, model.counts.computed_tokens
        model.counts.flat_tokens = model.counts.computed_tokens = 0
        drafts = self._pool.stats(model.id)
        self._options.log(
            f"{model.id} step {model.num_steps}: {flat} flat tokens, {computed} computed; sampled "
            f"{drafts['tokens_per_forward']:.2f} tokens per forward, {drafts['accepted_tokens']} drafts accepted so far"
        )
        values = {"grad_norm": norm, "flat_tokens": float(flat), "computed_tokens": float(computed)}
        return {"metrics": {f"treering/{name}": value for name, value in values.items()}}

    async def _save_weights(self, fields: Fields) -> dict[str, Any]:
        return self._job(fields, lambda model: self._saving(model, fields, "weights"))

    def _saving(self, model: TrainedModel, fields: Fields, kind: str) -> Callable[[], dict[str, Any]]:
        name = fields.need("path", str)
        path = f"tinker://{model.id}/{kind}/{name}"
        self._checkpoints.folder_of(path)
        ttl_s = fields.take_any("ttl_seconds", (int,), None)
        if ttl_s is not None and not 1 <= ttl_s <= _MAX_TTL_S:
            raise InputError(f"ttl_seconds of the body must lie in [1, {_MAX_TTL_S}], got {show(ttl_s)}")
        overwrites = fields.take("overwrite", bool, False) or kind != "weights"
        facts = {
            "base_model": self._base.name,
            "base": self._base.checksum,
            "options": model.options.facts(),
            "user_metadata": fields.take("user_metadata", dict, {}) or None,
            "run_metadata": model.metadata or None,
        }

        def save() -> dict[str, Any]:
            trainee = model.ready()
            self._checkpoints.save(
                path,
                lambda folder: trainee.save(folder, with_optimizer=kind == "weights"),
                facts,
                ttl_s=ttl_s,
                overwrites=overwrites,
            )
            return {"path": path, "type": "save_weights" if kind == "weights" else "save_weights_for_sampler"}

        return save

    async def _save_for_sampler(self, fields: Fields) -> dict[str, Any]:
        def make(model: TrainedModel) -> Callable[[], Any]:
            if fields.take("kind", str, "snapshot") not in ("snapshot", "inflight"):
                raise InputError("kind of the body must be snapshot or inflight")
            number = fields.take_any("sampling_session_seq_id", (int,), None)
            if number is None:
                return self._saving(model, fields, "sampler_weights")
            session = self._held.session(model.id.partition(":")[0])
            name = f"{session.id}:sample:{number}"

            def save() -> dict[str, Any]:
                session.samplers[name] = model.weights_now()
                return {"sampling_session_id": name, "type": "save_weights_for_sampler"}

            return save

        return self._job(fields, make)

    async def _load_weights(self, fields: Fields) -> dict[str, Any]:
        path, with_optimizer = fields.need("path", str), fields.take("optimizer", bool, False)
        session_id = fields.take_any("session_id", (str,), None)
        if session_id is None:
            return self._job(fields, lambda model: self._loading(model, self._find(path), with_optimizer))

        def plan() -> tuple[TraineeOptions, _Start]:
            saved = self._find(path)
            options = TraineeOptions(**saved.facts["options"])
            return options, lambda model: self._loading(model, saved, with_optimizer)()

        return self._add(fields, session_id, plan)

    def _find(self, path: str, kind: str = "weights") -> SavedModel:
        """Return a checkpoint of this base model."""
        saved = self._checkpoints.find(path)
        if saved.facts["base"] != self._base.checksum:
            raise InputError(f"{path} belongs to another base model, {saved.facts['base_model']!r}; serve that model")
        if kind == "weights" != path.split("/")[-2]:
            raise InputError(f"training resumes from .../weights/NAME, which save_state writes, got {path}")
        return saved

    def _loading(self, model: TrainedModel, saved: SavedModel, with_optimizer: bool) -> Callable[[], dict[str, Any]]:
        if TraineeOptions(**{**saved.facts["options"], "seed": model.options.seed}) != model.options:
            raise InputError(f"{saved.path} has {saved.facts['options']}, but the model has {model.options.facts()}")

        def load() -> dict[str, Any]:
            trainee = model.trainee or self._trainee(model.options)
            trainee.load(saved.folder, with_optimizer=with_optimizer)
            model.trainee = trainee
            return {"path": saved.path, "model_id": model.id, "type": "load_weights"}

        return load

    async def _create_sampler(self, fields: Fields) -> dict[str, Any]:
        session = self._held.session(fields.need("session_id", str))
        name = f"{session.id}:sample:{fields.take('sampling_session_seq_id', int, 0)}"
        if name not in session.samplers:
            base_model, path = fields.take("base_model", str, ""), fields.take("model_path", str, "")
            session.samplers[name] = self._weights_of(base_model, path)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def _weights_of(self, base_model: str, path: str) -> SamplerWeights:
        if base_model or not path:
            self._check_name(base_model)
        if not path:
            return SamplerWeights(owner="", name="")
        saved = self._find(path, "any")

        def load(model: nn.Module) -> None:
            load_weights(model, saved.folder)

        owner = path.removeprefix("tinker://").partition("/")[0]
        options = TraineeOptions(**saved.facts["options"])
        return SamplerWeights(owner=owner, name=f"{path} {saved.facts['time']}", options=options, load=load)

    def _sampler(self, name: str) -> SamplerWeights:
        found = self._held.session(name.partition(":")[0]).samplers.get(name)
        if found is None:
            raise Refusal(404, f"no sampler {name!r:.80}; create a sampling client first")
        return found

    def _get_sampler(self, name: str) -> dict[str, Any]:
        path = self._sampler(name).name.partition(" ")[0]
        return {
            "sampler_id": name,
            "base_model": self._base.name,
            "model_path": path if path.startswith("tinker://") else None,
        }

    async def _sample(self, fields: Fields) -> dict[str, Any]:
        name, seq_id = fields.take("sampling_session_id", str, ""), fields.take("seq_id", int, 0)
        request_id = f"{name}:{seq_id}" if name else f"once:{uuid.uuid4().hex}"
        if name and (known := self._held.promise(request_id)) is not None:
            return known.ticket()
        self._held.check_room(request_id)
        base_model, path = fields.take("base_model", str, ""), fields.take("model_path", str, "")
        weights = self._sampler(name) if name else self._weights_of(base_model, path)
        run, num_samples, num_bytes = self._sampling(fields, weights)
        ids = [f"{request_id}:{i}" for i in range(num_samples)]
        answer = asyncio.ensure_future(run)
        return self._held.give(request_id, answer, num_bytes=num_bytes, sample_sequence_ids=ids).ticket()

    def _sampling(self, fields: Fields, weights: SamplerWeights) -> tuple[Awaitable[bytes], int, int]:
        """Return an awaitable that computes the answer of `asample`, its number of samples, and what it holds."""
        prompt = take_prompt_chunks(fields)
        if int(prompt.max()) >= self._vocab_size:
            raise InputError(f"token ids of prompt must be below {self._vocab_size}, got {prompt.max()}")
        given: dict[str, Any] = fields.need("sampling_params", dict)
        stop = given.pop("stop", None)
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list | None):
            raise InputError(
                f"stop of sampling_params must be a string, or a list of strings or token ids, got {show(stop)}"
            )
        if stops is not None:
            ids = [each for each in stops if not isinstance(each, str)]
            given |= {"stop_token_ids": ids, "stop": [each for each in stops if isinstance(each, str)]}
            given["ignore_eos"] = True
        wants_logprobs = fields.take("prompt_logprobs", bool, False)
        num_left = self._options.num_positions - prompt.size
        # A prompt that fills the context can be scored, although it leaves no room for the token sampled with it.
        only_scores = wants_logprobs and num_left == 0 and given.get("max_tokens") == 1
        params = Fields({**given, "n": fields.take("num_samples", int, 1)}, "sampling_params")
        asked = take_sampling(
            params,
            num_left=num_left + only_scores,
            default_max_tokens=None,
            num_context=prompt.size,
            ends=self._options.stop_tokens,
        )
        params.end()
        top_prompt, top_sampled = (fields.take(f"topk_{name}_logprobs", int, 0) for name in ("prompt", "sample"))
        num_sampled = asked.num_samples * (prompt.size + asked.sampling.max_tokens)
        for name, num_top, num_tokens in (
            ("topk_prompt_logprobs", top_prompt, prompt.size),
            # Each sample is scored whole.
            ("topk_sample_logprobs", top_sampled, num_sampled),
        ):
            most = min(self._vocab_size - 1, MAX_CELLS // num_tokens)
            if not 0 <= num_top <= most:
                raise InputError(
                    f"{name} must lie in [0, {most}] for {num_tokens} tokens in all, got {num_top}; ask for fewer "
                    "log-probs or tokens"
                )
        last_n = fields.take("prompt_logprobs_last_n", int, prompt.size)
        matrix = take_matrix(fields, "target_prompt_logprobs", prompt.size - 1, self._vocab_size)
        fields.refuse_unless("prompt_alt_tokens_k", (0,), "is not supported; ask for topk_prompt_logprobs")
        fields.refuse_unless(
            "record_stability_info", (False,), "is for stable_reinforce, which has no published definition; set "
            "loss_fn=importance_sampling"
        )  # fmt: skip
        fields.ignore("type")
        fields.end()

        wants_scores = wants_logprobs or top_prompt > 0 or matrix is not None
        plain = Sampling(max_tokens=1, stop_tokens=asked.sampling.stop_tokens)
        # As in `compute_logprobs`, whose one token is drawn in the pass that scores the prompt.
        is_drawn = wants_scores and not only_scores and asked.seed is None and asked.sampling == plain

        async def run() -> bytes:
            samples: list[Sampled] = [(prompt[:0], [], "length")] * asked.num_samples
            scores = None
            if not (only_scores or is_drawn):
                rollouts = await self._pool.sample(weights, prompt, asked.sampling, asked.num_samples, asked.seed)
                samples = [(each.tokens, logprobs_of(each, asked), each.finish_reason) for each in rollouts]
            if wants_scores:
                scores = await self._pool.score(
                    weights,
                    prompt,
                    targets=None if matrix is None else matrix[0],
                    top_k=top_prompt,
                    num_drawn=asked.num_samples if is_drawn else 0,
                )
                if is_drawn:
                    samples = [
                        (token, logprob, "stop" if token[0] in plain.stop_tokens else "length")
                        for token, logprob in zip(*(each[:, None] for each in scores.drawn), strict=True)
                    ]
            tops = []
            if top_sampled:
                whole = [np.concatenate([prompt, tokens]) for tokens, _, _ in samples]
                found = await asyncio.gather(*(self._pool.score(weights, each, top_k=top_sampled) for each in whole))
                tops = [each.top for each in found if each.top is not None]
            return sample_answer(
                prompt.size,
                samples,
                scores,
                tops,
                has_logprobs=wants_logprobs,
                last_n=last_n,
                layout=None if matrix is None else matrix[1],
            )

        return run(), asked.num_samples, prompt.nbytes + (0 if matrix is None else matrix[0].nbytes)

    async def _retrieve(self, fields: Fields) -> dict[str, Any] | bytes:
        name = fields.need("request_id", str)
        promise = self._held.promise(name)
        if promise is None:
            raise Refusal(410, f"no request {name!r:.80}: its session has ended, or another server has it")
        with suppress(Refusal):
            # A client that waits is alive.
            self._held.session(name.partition(":")[0])
        await asyncio.wait([promise.answer], timeout=POLL_S)
        if not promise.answer.done():
            raise Refusal(408, f"{name} is still being computed; ask again")
        self._held.note_fetched(promise)
        if promise.answer.cancelled():
            return {"error": "the request was cancelled, or its session has ended", "category": "user"}
        if (error := promise.answer.exception()) is not None:
            refusal = refusal_of(error)
            return {"error": refusal.text, "category": "user" if refusal.status < 500 else "server"}
        found: dict[str, Any] | bytes = promise.answer.result()
        return found

    async def _cancel(self, fields: Fields) -> dict[str, Any]:
        promise = self._held.promise(fields.need("request_id", str))
        if promise is not None:
            promise.answer.cancel()
        return {}

    async def _weights_info(self, fields: Fields) -> dict[str, Any]:
        saved = self._checkpoints.find(fields.need("tinker_path", str), checks=False)
        return _about(saved.facts)

    def _runs(self) -> list[str]:
        return sorted({saved.path.split("/")[2] for saved in self._checkpoints.all()})

    def _run(self, run: str) -> dict[str, Any]:
        saved = self._saved(run)
        if not saved:
            raise Refusal(404, f"no training run {run!r:.80} has a checkpoint here")
        cards = [each.card() for each in saved]
        training, sampler = ([c for c in cards if c["checkpoint_type"] == kind] for kind in ("training", "sampler"))
        about = _about(saved[-1].facts)
        return {
            "training_run_id": run,
            "base_model": about["base_model"],
            "model_owner": "local",
            "is_lora": about["is_lora"],
            "lora_rank": about.get("lora_rank"),
            "last_request_time": cards[-1]["time"],
            "last_checkpoint": training[-1] if training else None,
            "last_sampler_checkpoint": sampler[-1] if sampler else None,
            "user_metadata": saved[-1].facts.get("run_metadata"),
        }

    def _saved(self, run: str) -> list[SavedModel]:
        if run != "*" and not _RUN.fullmatch(run):
            raise Refusal(404, f"a training run must be SESSION:train:NUMBER, got {run!r:.80}")
        return list(self._checkpoints.all(run))

    def _list(self, run: str) -> dict[str, Any]:
        return {"checkpoints": [saved.card() for saved in self._saved(run)]}

    def _delete(self, run: str, kind: str, name: str) -> None:
        self._checkpoints.remove(f"tinker://{run}/{kind}/{name}")

    def _check_name(self, name: str) -> None:
        if name != self._base.name:
            raise Refusal(404, f"this server has the model {self._base.name!r}, got {name!r:.200}")


def _about(facts: Mapping[str, Any]) -> dict[str, Any]:
    options = dict(facts["options"])
    rank = options.pop("rank")
    kinds = {name: options[name] for name in ("train_mlp", "train_attn", "train_unembed")}
    return {"base_model": facts["base_model"], "is_lora": rank > 0, **({"lora_rank": rank, **kinds} if rank else {})}


def _count(query: Mapping[str, str], name: str, default: int) -> int:
    given = query.get(name, str(default))
    if re.fullmatch(r"\d{1,9}", given, re.ASCII) is None:
        raise InputError(f"{name} must be a number of at most nine digits, got {given!r:.80}")
    return int(given)


def _check_adam(fields: Fields) -> None:
    kind = fields.take("optimizer_config", dict, {}).get("type", "adamw")
    if kind != "adamw":
        raise UnsupportedError(f"optimizer_config must be AdamOptimizerConfig, got the type {kind!r:.80}; remove it")


def _check_release(fields: Fields) -> None:
    """Refuse releases of the client that were not tested."""
    release = fields.need("sdk_version", str)
    if satisfies(release, TESTED) is not True:
        raise ConfigError(
            f"sdk_version must be that of a tested client, tinker{TESTED}, got {release!r:.40}; install one"
        )
