"""Answers calls over HTTP from a thread of its own.

Every call that arrives whole is answered or refused; a client that leaves aborts its calls.
"""

import asyncio
import hmac
import json
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treering.closing import Closing
from treering.errors import ConfigError, InputError, StateError, UnsupportedError
from treering.extras import require
from treering.rl.environments.chat import ChatTokens
from treering.rl.tasks.text_tokens import TextTokens
from treering.runtime.ipc.address import is_loopback, listener_at
from treering.serving import completions, tokens
from treering.serving.chats import Chats
from treering.serving.fields import Fields
from treering.serving.sampler import Caller, Sampler
from treering.serving.sampling_params import take_sampling
from treering.types import TokenIds

if TYPE_CHECKING:
    from aiohttp import web

IDENTITY_HEADER = "X-Session-ID"
_Route = Callable[[Mapping[str, Any], str | None], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Refusal(Exception):  # noqa: N818 - not an error of the server
    """A call that is not answered; the text states the rule, the value and the fix."""

    status: int
    """HTTP status: 400 bad input, 401 no key, 404 unknown model or path, 413 too large, 500 the engine's error."""
    text: str


def refusal_of(error: BaseException) -> Refusal:
    """What a client is told of an error.

    Example:
        >>> refusal_of(InputError("a prompt holds at least one token")).status
        400
    """
    if isinstance(error, Refusal):
        return error
    if isinstance(error, InputError | ConfigError | UnsupportedError):
        return Refusal(400, str(error))
    if isinstance(error, StateError):
        return Refusal(503, str(error))
    return Refusal(500, f"{type(error).__name__}: {error}")


def as_json(refusal: Refusal) -> dict[str, Any]:
    """The body of a refusal, as OpenAI's clients read it."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": refusal.text, "type": kind, "code": refusal.status}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where a server listens, and what it takes.

    Example: `ServerSettings(port=0)` listens on a free port of this machine alone.
    """

    host: str = "127.0.0.1"
    """IP address; one beyond loopback needs a key."""
    port: int = 8000
    """0 is a free one."""
    api_key: str | None = None
    """What clients send as `Authorization: Bearer KEY`; None lets everybody in."""
    max_body_bytes: int = 64 << 20
    """Largest body of a call."""
    body_timeout_s: float = 60.0
    """Longest time that a body may take to arrive."""
    backlog: int = 1024
    """Connections that wait to be accepted."""

    def __post_init__(self) -> None:
        try:
            is_open = not is_loopback(self.host)
        except ValueError:
            raise ConfigError(
                f'a server listens at an IP address, got host={self.host!r}; set host="127.0.0.1" for this machine'
            ) from None
        if is_open and not self.api_key:
            raise ConfigError(
                f"a server that other machines reach needs a key, got host={self.host!r} without; set api_key, or "
                'host="127.0.0.1"'
            )


class Server(Closing):
    """Answers calls over HTTP until it is closed.

    Routes: `POST /inference/v1/generate`, `POST /v1/completions`,
    `POST /v1/chat/completions`, `GET /v1/models`, `GET /health`. Calls carry their
    identity in `cache_salt` or the header X-Session-ID; see `treering.serving.sampler`.

    Example:
        >>> with EngineHost(engine) as host:                                                    # doctest: +SKIP
        ...     with Server(HostSampler(host), model="tiny", num_positions=512) as server:
        ...         print(server.url)
        http://127.0.0.1:8000
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        model: str,
        num_positions: int,
        texts: TextTokens | None = None,
        chat: ChatTokens | None = None,
        settings: ServerSettings | None = None,
    ) -> None:
        """Listens, and answers from now on.

        Args:
            sampler: answers the calls; it outlives the server.
            model: name that clients call the model by.
            num_positions: most tokens of a context and its answer together.
            texts: for completions; None serves tokens alone.
            chat: for chats; None refuses them.
            settings: where it listens.

        Raises:
            MissingExtraError: aiohttp is not installed.
            ConfigError: the address is taken or none of this machine's.
        """
        require("treering.serving", "aiohttp")
        self._sampler, self._model, self._num_positions, self._texts = sampler, model, num_positions, texts
        self._chats = None if chat is None else Chats(chat)
        self._settings = settings or ServerSettings()
        own = self._settings
        try:
            self._socket = listener_at(own.host, own.port, own.backlog)
        except OSError as error:
            raise ConfigError(
                f"a server listens at a free address of this machine, got port {own.port} of {own.host} "
                f"({error.strerror}); choose another"
            ) from error
        self._loop = asyncio.new_event_loop()
        self._is_ready, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="treering-server", daemon=True)
        self._thread.start()
        self._is_ready.wait()

    @property
    def model(self) -> str:
        """Name that clients call the model by."""
        return self._model

    @property
    def url(self) -> str:
        """Where it answers, such as http://127.0.0.1:8000."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def close(self) -> None:
        """Closes connections, aborts the calls that are open, and ends the thread."""
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
                web.get("/v1/models", self._models),
                web.post("/inference/v1/generate", self._route(self._generate)),
                web.post("/v1/completions", self._route(self._complete)),
                web.post("/v1/chat/completions", self._route(self._chat)),
            ]
        )
        # Without it a call of a client that left would run to its end.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.SockSite(runner, self._socket, backlog=self._settings.backlog).start()
        self._is_ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _health(self, _request: "web.Request") -> "web.Response":
        return _respond({"status": "ok"})

    async def _models(self, request: "web.Request") -> "web.Response":
        if (refusal := self._unknown_key(request)) is not None:
            return _respond(as_json(refusal), refusal.status)
        card = {"id": self._model, "object": "model", "owned_by": "treering", "max_model_len": self._num_positions}
        return _respond({"object": "list", "data": [card]})

    def _route(self, answer: _Route) -> Callable[["web.Request"], Awaitable["web.Response"]]:
        """A handler that answers, or says why not."""

        async def handle(request: "web.Request") -> "web.Response":
            try:
                if (refusal := self._unknown_key(request)) is not None:
                    raise refusal
                body = await self._read(request)
                return _respond(await answer(body, request.headers.get(IDENTITY_HEADER)))
            except Exception as error:
                refusal = refusal_of(error)
                return _respond(as_json(refusal), refusal.status)

        return handle

    def _unknown_key(self, request: "web.Request") -> Refusal | None:
        key = self._settings.api_key
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        # A header of other bytes than UTF-8 is read with surrogates.
        if key is None or hmac.compare_digest(given.encode(errors="surrogateescape"), key.encode()):
            return None
        return Refusal(401, "this server needs its key; send Authorization: Bearer KEY")

    async def _read(self, request: "web.Request") -> dict[str, Any]:
        from aiohttp import web

        try:
            raw = await asyncio.wait_for(request.read(), self._settings.body_timeout_s)
        except TimeoutError:
            raise Refusal(408, f"a body arrives within {self._settings.body_timeout_s} s; send it at once") from None
        except web.HTTPRequestEntityTooLarge:
            raise Refusal(413, f"a body has at most {self._settings.max_body_bytes} bytes; send less") from None
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"a body is JSON, got something else ({error}); send a JSON object") from None
        if not isinstance(body, dict):
            raise Refusal(400, f"a body is a JSON object, got {type(body).__name__}; send an object")
        return body

    async def _generate(self, body: Mapping[str, Any], session: str | None) -> dict[str, Any]:
        fields = Fields(body, "the body")
        caller = self._take_names(fields, session)
        context = tokens.take_tokens(fields)
        params = Fields(fields.take("sampling_params", dict, {}), "sampling_params")
        asked = take_sampling(params, num_left=self._num_left(context), default_max_tokens=None)
        params.refuse_unless("routed_experts_prompt_start", (0,), "asks for routed experts, which are not recorded")
        params.end()
        fields.end()
        return tokens.answer(_new_id("gen"), context, await self._sampler.sample(context, asked, caller), asked)

    async def _complete(self, body: Mapping[str, Any], session: str | None) -> dict[str, Any]:
        fields = Fields(body, "the body")
        caller = self._take_names(fields, session)
        context, has_ids = completions.take_prompt(fields, self._texts)
        asked = take_sampling(
            fields, num_left=self._num_left(context), default_max_tokens=completions.DEFAULT_MAX_TOKENS
        )
        fields.end()
        texts = completions.need(self._texts)
        rollouts = await self._sampler.sample(context, asked, caller)
        return completions.answer(_new_id("cmpl"), self._model, context, rollouts, asked, texts, has_ids)

    async def _chat(self, body: Mapping[str, Any], session: str | None) -> dict[str, Any]:
        if self._chats is None:
            raise Refusal(400, "this server has no chat template, and reads no chats; use /v1/completions")
        fields = Fields(body, "the body")
        caller = self._take_names(fields, session)
        chat = self._chats.take(fields, caller.identity or caller.session)
        asked = take_sampling(fields, num_left=self._num_left(chat.context), default_max_tokens=None)
        fields.end()
        asked = self._chats.with_stops(asked)
        rollouts = await self._sampler.sample(chat.context, asked, caller)
        return self._chats.answer(_new_id("chatcmpl"), self._model, chat, rollouts, asked)

    def _take_names(self, fields: Fields, session: str | None) -> Caller:
        """Takes the model's name, which has to be right, and who asks."""
        if (name := fields.take("model", str, self._model)) != self._model:
            raise Refusal(404, f"this server has the model {self._model!r}, got {name!r}; name it")
        return Caller(identity=fields.take("cache_salt", str, "") or None, session=session)

    def _num_left(self, context: TokenIds) -> int:
        return self._num_positions - int(context.size)


def _respond(body: dict[str, Any], status: int = 200) -> "web.Response":
    from aiohttp import web

    return web.json_response(body, status=status)


def _new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"
