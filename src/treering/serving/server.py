"""HTTP server of a model's samples, in its own thread: chats, completions, and tokens in and out.

Every call that arrives whole is answered or refused; a client that disconnects aborts its calls.

A call's name keys its noise, so equal names get equal answers:

- a call with a seed is named by its context and the seed;
- a call with an identity, in `cache_salt` or the header X-Session-ID, is named by the identity, its context and how
  often the identity has sampled that context before;
- any other call is named by its number.

A session remembers its chats (`Chats`). A chat that begins with the messages of an earlier answer continues that
answer's token ids, which are not rendered again.
"""

import asyncio
import hmac
import itertools
import json
import re
import socket
import threading
import uuid
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from treering.closing import Closing
from treering.data.trajectory import valid_text
from treering.engine.host import EngineHost, Watch
from treering.engine.protocol import Request, Rollout, RolloutKey, Sampling
from treering.engine.sampling.noise import call_id
from treering.errors import ConfigError, ContextFullError, InputError, StateError, UnsupportedError
from treering.extras import require
from treering.files.writing import FULL
from treering.rl.environments.chat import ChatTokens
from treering.rl.tasks.text_tokens import TextTokens, find_stop_tokens
from treering.serving.bodies import (
    DEFAULT_MAX_TOKENS,
    Asked,
    Fields,
    completion_answer,
    need_texts,
    take_prompt,
    take_sampling,
    take_tokens,
    text_of,
    token_answer,
)
from treering.serving.chats import Chats
from treering.serving.stream import TextCall, WatchAnswer, error_event, events, settled_text, take_stream
from treering.types import PromptId, TokenIds

if TYPE_CHECKING:
    from aiohttp import web


MAX_IDENTITIES = 65536
"""Most identities whose calls a server counts; those idle longest are forgotten first."""


_EPISODE = re.compile(r"(?P<task>.*)\|(?P<draw>\d{1,9})\|(?P<sample>\d{1,9})", re.DOTALL)


class Calls:
    """Name calls, and turn each into requests.

    Example: two calls of the identity "q1|0|3" with equal contexts are rollouts of task "q1", draw 0 and sample 3, with
    different call ids.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._counts: OrderedDict[str, Counter[int]] = OrderedDict()

    def requests(self, context: TokenIds, asked: Asked, identity: str | None) -> list[Request]:
        """Return one request for each sample that a call asks for.

        Args:
            context: int32 [N].
            asked: sampling that the call asks for.
            identity: "TASK|DRAW|SAMPLE" of an episode, or any other name of a session; None for a call without one.
        """
        sampling, num_samples = asked.sampling, asked.num_samples
        if identity is None and asked.seed is None:
            return [_request("", 0, next(self._numbers), context, sampling, None) for _ in range(num_samples)]
        prompt_id, draw, sample = _episode(identity or "")
        draw = draw if asked.seed is None else asked.seed
        if identity is None:
            calls = [call_id(context, i) for i in range(num_samples)]
        else:
            calls = [call_id(context, self._count(identity, call_id(context))) for _ in range(num_samples)]
        return [_request(prompt_id, draw, sample, context, sampling, call) for call in calls]

    def _count(self, identity: str, context: int) -> int:
        """Return how often an identity has sampled a context before this call."""
        counts = self._counts.setdefault(identity, Counter())
        self._counts.move_to_end(identity)
        if len(self._counts) > MAX_IDENTITIES:
            self._counts.popitem(last=False)
        counts[context] += 1
        return counts[context] - 1


def _episode(identity: str) -> tuple[str, int, int]:
    found = _EPISODE.fullmatch(identity)
    return (found["task"], int(found["draw"]), int(found["sample"])) if found else (identity, 0, 0)


def _request(
    prompt_id: PromptId, draw: int, sample: int, context: TokenIds, sampling: Sampling, call: int | None
) -> Request:
    return Request(prompt_id=prompt_id, draw=draw, sample=sample, prompt=context, sampling=sampling, call=call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Names that a call gives for itself.

    Example: `Caller(identity="q1|0|3", session="trace-7")`
    """

    identity: str | None = None
    """`cache_salt` of the body."""
    session: str | None = None
    """Value of the header X-Session-ID."""


class CallSampler(Protocol):
    """Anything that answers calls."""

    async def sample(
        self, context: TokenIds, asked: Asked, caller: Caller, watch: WatchAnswer | None = None
    ) -> list[Rollout]:
        """Return `asked.num_samples` answers after a context int32 [N]; cancelling the call aborts them.

        `watch`, if given, may get them while they run.
        """
        ...


class HostSampler:
    """Sampler that answers with an engine, naming calls by `Calls`.

    Example:
        >>> sampler = HostSampler(host)                                                         # doctest: +SKIP
    """

    def __init__(self, host: EngineHost) -> None:
        """Sample with `host`, which must outlive the sampler."""
        self._host = host
        self._calls = Calls()
        self._turns: WeakValueDictionary[RolloutKey, asyncio.Lock] = WeakValueDictionary()

    async def sample(
        self, context: TokenIds, asked: Asked, caller: Caller, watch: WatchAnswer | None = None
    ) -> list[Rollout]:
        """Return the answers to a call; if one fails, abort the others."""
        requests = self._calls.requests(context, asked, caller.identity or caller.session)
        watches = [None if watch is None else partial(watch, i) for i in range(len(requests))]
        try:
            async with asyncio.TaskGroup() as group:
                asking = [group.create_task(self._sample_one(*each)) for each in zip(requests, watches, strict=True)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in asking]

    async def _sample_one(self, request: Request, watch: Watch | None) -> Rollout:
        """Sample when no other call of the same key runs; equal calls with a seed may arrive at the same time."""
        turn = self._turns.setdefault(request.key, asyncio.Lock())
        async with turn:
            return await self._host.sample(request, watch)


IDENTITY_HEADER = "X-Session-ID"
_Route = Callable[[Mapping[str, Any], str | None], Awaitable[dict[str, Any] | TextCall]]
_Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]


@dataclass(frozen=True, slots=True)
class Refusal(Exception):  # noqa: N818 - not an error of the server
    """Error answer to a call; its text states the rule, the value and the fix."""

    status: int
    """HTTP status: 400 bad input, 401 wrong key, 404 unknown model or path, 408 slow body, 413 large body, 5xx
    engine error."""
    text: str
    code: str | None = None
    """OpenAI's error code, where clients check it; None: the status."""


def refusal_of(error: BaseException) -> Refusal:
    """Return the refusal to send for an error.

    Example:
        >>> refusal_of(InputError("a prompt must have at least one token")).status
        400
    """
    if isinstance(error, Refusal):
        return error
    if isinstance(error, ContextFullError):
        return Refusal(400, str(error), "context_length_exceeded")
    if isinstance(error, InputError | ConfigError | UnsupportedError):
        return Refusal(400, str(error))
    if isinstance(error, StateError):
        return Refusal(503, str(error))
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or re.search("CUDA out of memory|allocate memory", str(error)):
        return Refusal(503, f"memory is full ({words}); send less at once, or serve with a lower --max-tokens")
    if isinstance(error, OSError) and error.errno in FULL:
        return Refusal(503, f"the server's disk is full ({words}); free space there, and send it again")
    return Refusal(500, words)


def as_json(refusal: Refusal) -> dict[str, Any]:
    """Return the body of a refusal in OpenAI's format."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": refusal.text, "type": kind, "code": refusal.code or refusal.status}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Address of a server, and the limits of calls.

    Example: `ServerSettings(port=0)` listens on a free port of this machine only.
    """

    host: str = "127.0.0.1"
    """IP address; an address beyond loopback needs a key."""
    port: int = 8000
    """Port; 0: a free one."""
    api_key: str | None = None
    """Key that clients send as `Authorization: Bearer KEY`; None lets everybody in."""
    max_body_bytes: int = 64 << 20
    """Largest body of a call."""
    body_timeout_s: float = 60.0
    """Longest time that a body may take to arrive."""
    backlog: int = 1024
    """Connections that may wait to be accepted."""

    def __post_init__(self) -> None:
        try:
            is_open = not ip_address(self.host).is_loopback
        except ValueError:
            raise ConfigError(
                f'host must be an IP address, got {self.host!r}; set host="127.0.0.1" for this machine'
            ) from None
        if is_open and not self.api_key:
            raise ConfigError(
                f"a server that other machines can reach needs a key, got host={self.host!r} without one; set api_key, "
                'or host="127.0.0.1"'
            )


class MoreRoutes(Protocol):
    """Routes in addition to the server's own, such as Tinker's."""

    def routes(self, server: "Server") -> "list[web.RouteDef]":
        """Return the routes; called once, in the server's thread."""
        ...

    async def close(self) -> None:
        """Release resources; called once, after the last answer."""
        ...


class Server(Closing):
    """HTTP server that answers calls until it is closed.

    Routes: `POST /inference/v1/generate`, `POST /v1/completions`, `POST /v1/chat/completions`, `GET /v1/models`,
    `GET /health`. Calls carry their identity in `cache_salt` or the header X-Session-ID.

    Example:
        >>> with EngineHost(engine) as host:                                                    # doctest: +SKIP
        ...     with Server(HostSampler(host), model="tiny", num_positions=512) as server:
        ...         print(server.url)
        http://127.0.0.1:8000
    """

    def __init__(
        self,
        sampler: CallSampler,
        *,
        model: str,
        num_positions: int,
        texts: TextTokens | None = None,
        chat: ChatTokens | None = None,
        stop_tokens: Sequence[int] | None = None,
        settings: ServerSettings | None = None,
        more: MoreRoutes | None = None,
    ) -> None:
        """Listen, and answer from now on.

        Args:
            sampler: answers the calls; must outlive the server.
            model: name by which clients call the model.
            num_positions: most tokens of a context and its answer together.
            texts: tokenizer of completions; None serves only tokens.
            chat: tokenizer of chats; None refuses them.
            stop_tokens: ids that end every answer, unless a call sets `ignore_eos`; None: those of `chat`.
            settings: where to listen.
            more: other routes, which the server closes.

        Raises:
            MissingExtraError: aiohttp is not installed.
            ConfigError: the address is taken, or does not belong to this machine.
        """
        require("treering.serving", "aiohttp")
        self._sampler, self._model, self._num_positions, self._texts = sampler, model, num_positions, texts
        self._chats, self._more = None if chat is None else Chats(chat), more
        if stop_tokens is None and chat is not None:
            stop_tokens = [stop.token_id for stop in find_stop_tokens(chat.text, chat.renderer)]
        self._ends = tuple(stop_tokens or ())
        self._settings = settings or ServerSettings()
        own = self._settings
        try:
            family = socket.AF_INET6 if ":" in own.host else socket.AF_INET
            self._socket = socket.create_server((own.host, own.port), family=family, backlog=own.backlog)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on port {own.port} of {own.host} ({error.strerror}); choose a free address of this "
                "machine"
            ) from error
        self._loop = asyncio.new_event_loop()
        self._is_ready, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="treering-server", daemon=True)
        self._thread.start()
        self._is_ready.wait()

    @property
    def model(self) -> str:
        """Name by which clients call the model."""
        return self._model

    @property
    def url(self) -> str:
        """Base URL, such as http://127.0.0.1:8000."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def close(self) -> None:
        """Close connections, abort open calls, and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._answer_until_stopped())
        finally:
            self._is_ready.set()
            self._loop.close()

    async def _answer_until_stopped(self) -> None:
        from aiohttp import web

        app = web.Application(client_max_size=self._settings.max_body_bytes)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self.guarded(self._models)),
                web.post("/inference/v1/generate", self._route(self._generate)),
                web.post("/v1/completions", self._route(self._complete)),
                web.post("/v1/chat/completions", self._route(self._chat)),
            ]
        )
        if self._more is not None:
            app.add_routes(self._more.routes(self))
        # handler_cancellation aborts the calls of a client that disconnects.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.SockSite(runner, self._socket, backlog=self._settings.backlog).start()
        self._is_ready.set()
        await self._stop.wait()
        await runner.cleanup()
        if self._more is not None:
            await self._more.close()

    async def _health(self, _request: "web.Request") -> "web.Response":
        return _respond({"status": "ok"})

    async def _models(self, _request: "web.Request") -> "web.Response":
        card = {"id": self._model, "object": "model", "owned_by": "treering", "max_model_len": self._num_positions}
        return _respond({"object": "list", "data": [card]})

    def _route(self, answer: _Route) -> _Handler:
        """Return a handler that answers a JSON object with another, or with events."""

        async def handle(request: "web.Request") -> "web.StreamResponse":
            body = await self.read_json(request)
            found = await answer(body, request.headers.get(IDENTITY_HEADER))
            if not isinstance(found, TextCall):
                return _respond(found)
            return (
                await _stream(request, found) if found.is_streamed else _respond(found.whole(await found.sample(None)))
            )

        return self.guarded(handle)

    def guarded(self, answer: _Handler) -> _Handler:
        """Return a handler that checks the key and answers errors as refusals."""

        async def handle(request: "web.Request") -> "web.StreamResponse":
            try:
                if (refusal := self._unknown_key(request)) is not None:
                    raise refusal
                return await answer(request)
            except Exception as error:
                refusal = refusal_of(error)
                return _respond(as_json(refusal), refusal.status)

        return handle

    def _unknown_key(self, request: "web.Request") -> Refusal | None:
        key = self._settings.api_key
        given = request.headers.get("X-API-Key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        # A header that is not UTF-8 is decoded with surrogates.
        if key is None or hmac.compare_digest(given.encode(errors="surrogateescape"), key.encode()):
            return None
        return Refusal(401, "this server needs its key; send Authorization: Bearer KEY")

    async def read_raw(self, request: "web.Request") -> bytes:
        """Return a body.

        Raises:
            Refusal: 408 or 413, it is too slow or too large.
        """
        from aiohttp import web

        try:
            return await asyncio.wait_for(request.read(), self._settings.body_timeout_s)
        except TimeoutError:
            raise Refusal(408, f"a body must arrive within {self._settings.body_timeout_s} s; send it again") from None
        except web.HTTPRequestEntityTooLarge:
            raise Refusal(413, f"a body may have at most {self._settings.max_body_bytes} bytes; send less") from None

    async def read_json(self, request: "web.Request") -> dict[str, Any]:
        """Return a body that is a JSON object.

        Raises:
            Refusal: 400, it is something else; or as `read_raw` does.
        """
        raw = await self.read_raw(request)
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the body is not JSON ({error}); send a JSON object") from None
        if not isinstance(body, dict):
            raise Refusal(400, f"the body must be a JSON object, got {type(body).__name__}; send one")
        return body

    async def _generate(self, body: Mapping[str, Any], session: str | None) -> dict[str, Any]:
        fields = Fields(body, "the body")
        caller = self._take_names(fields, session)
        context = take_tokens(fields)
        params = Fields(fields.take("sampling_params", dict, {}), "sampling_params")
        asked = self._take_sampling(params, context, None)
        if asked.sampling.num_top_logprobs == 1:
            # Trainers ask for 1 and read the sampled token's.
            asked = replace(asked, sampling=asked.sampling.changed(num_top_logprobs=0))
        params.refuse_unless("routed_experts_prompt_start", (0,), "asks for routed experts, which are not recorded")
        params.end()
        fields.end()
        return token_answer(_new_id("gen"), context, await self._sampler.sample(context, asked, caller), asked)

    async def _complete(self, body: Mapping[str, Any], session: str | None) -> TextCall:
        fields = Fields(body, "the body")
        caller = self._take_names(fields, session)
        context, has_ids = take_prompt(fields, self._texts)
        asked = self._take_sampling(fields, context, DEFAULT_MAX_TOKENS)
        is_streamed, has_usage = take_stream(fields)
        fields.end()
        texts, name = need_texts(self._texts), _new_id("cmpl")
        return TextCall(
            sample=lambda watch: self._sampler.sample(context, asked, caller, watch),
            whole=lambda rollouts: completion_answer(name, self._model, context, rollouts, asked, texts, has_ids),
            settled=lambda rollout: settled_text(text_of(rollout, asked, texts.decode), asked.sampling.stop_strings),
            is_streamed=is_streamed,
            has_usage=has_usage,
        )

    async def _chat(self, body: Mapping[str, Any], session: str | None) -> TextCall:
        chats = self._chats
        if chats is None:
            raise Refusal(400, "chats need a chat template, and this server has none; use /v1/completions")
        fields = Fields(body, "the body")
        caller = self._take_names(fields, session)
        chat = chats.take(fields, caller.identity or caller.session)
        asked = chats.with_stops(self._take_sampling(fields, chat.context, None))
        is_streamed, has_usage = take_stream(fields)
        fields.end()
        name = _new_id("chatcmpl")
        return TextCall(
            sample=lambda watch: self._sampler.sample(chat.context, asked, caller, watch),
            whole=lambda rollouts: chats.answer(name, self._model, chat, rollouts, asked),
            settled=lambda rollout: chats.settled(chat, rollout, asked),
            is_streamed=is_streamed,
            has_usage=has_usage,
        )

    def _take_names(self, fields: Fields, session: str | None) -> Caller:
        """Take the model's name, which must match, and the caller's identity."""
        if (name := fields.take("model", str, self._model)) != self._model:
            raise Refusal(404, f"model must be {self._model!r}, the model of this server, got {name!r}; correct it")
        identity = valid_text(fields.take("cache_salt", str, ""), "cache_salt")
        return Caller(identity=identity or None, session=session)

    def _take_sampling(self, fields: Fields, context: TokenIds, default_max_tokens: int | None) -> Asked:
        return take_sampling(
            fields,
            num_left=self._num_positions - int(context.size),
            default_max_tokens=default_max_tokens,
            num_context=int(context.size),
            ends=self._ends,
        )


async def _stream(request: "web.Request", call: TextCall) -> "web.StreamResponse":
    """Send events; an error before the first one is a refusal, a later one an event."""
    from aiohttp import web

    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    sending = events(call)
    try:
        async for event in sending:
            if not response.prepared:
                await response.prepare(request)
            await response.write(event)
    except Exception as error:
        if not response.prepared:
            raise
        await response.write(error_event(as_json(refusal_of(error))))
    finally:
        await sending.aclose()
    return response


def _respond(body: dict[str, Any], status: int = 200) -> "web.Response":
    from aiohttp import web

    return web.json_response(body, status=status)


def _new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"
