"""Define the engine protocol: the part of an engine that the loop, the scheduler, the server and the runtime use.

A `Request` is a prompt with a key, sampling parameters and optionally a rollout to continue; an `Engine` returns a
`Rollout`: tokens with log-probs, loss mask and policy versions.

    P tokens of the prompt   R tokens of the rollout, including those of an environment
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from treering.config.engine import Sampling as Sampling
from treering.data.image import PlacedImage, check_image_positions
from treering.data.trajectory import Rehearsed, valid_text
from treering.errors import ConfigError, InputError
from treering.types import MAX_TOKEN_ID, LossMask, PromptId, TokenIds

RolloutKey: TypeAlias = tuple[PromptId, int, int] | tuple[PromptId, int, int, int]
"""(prompt_id, draw, sample), plus the call for a call of an episode. With the engine's seed and a token's position it
keys the token's noise."""

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
"""stop: a stop token or string. length: max_tokens, or the engine's own limit. abort: aborted by the caller."""

Logprobs: TypeAlias = NDArray[np.float64]

_ARRAYS = ("tokens", "logprobs", "policy_logprobs", "loss_mask", "versions")


def key_of(prompt_id: PromptId, draw: int, sample: int, call: int | None) -> RolloutKey:
    """Return the key of a rollout, or of a call of an episode.

    Example: ("q", 0, 3) for a rollout, and ("q", 0, 3, 71) for a call.
    """
    return (prompt_id, draw, sample) if call is None else (prompt_id, draw, sample, call)


class TopLogprobs(NamedTuple):
    """Likeliest tokens at each position of a rollout, likeliest first."""

    tokens: NDArray[np.int32]
    """int32 [R, K]."""
    logprobs: Logprobs
    """float64 [R, K], under the sampled distribution, -inf for a token that cannot be sampled; with `top_k=1`, whose
    distribution has one token, after temperature only."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One continuation of a prompt.

    Example: a calculator rollout "2+3=" -> tool says "5" -> "." has loss_mask [1, 1, 1, 1, 0, 1].
    """

    prompt_id: PromptId
    """Id of the prompt that it continues."""
    draw: int
    """Number of times that the run had scheduled the prompt before."""
    sample: int
    """Index within the group."""
    tokens: TokenIds
    """int32 [R], without the prompt; ends with the stop token, if there is one."""
    logprobs: Logprobs
    """float64 [R], under the sampled distribution (after temperature, top-k, top-p); 0 for tokens not sampled."""
    policy_logprobs: Logprobs
    """float64 [R], after temperature only; 0 for tokens not sampled."""
    loss_mask: LossMask
    """bool [R], True for tokens that the policy sampled."""
    versions: NDArray[np.int32]
    """int32 [R], policy version that sampled each token, or that read it if an environment wrote it."""
    finish_reason: FinishReason
    """Why it ended."""
    reward: float | None = None
    """The task's reward; None until it is computed."""
    branched_from: int | None = None
    """Sample index of the rollout that it branched from; None if it did not branch."""
    num_shared: int = 0
    """Number of leading tokens copied from that rollout, with its log-probs and versions."""
    call: int | None = None
    """Id of the call, as in `Request.call`."""
    top: TopLogprobs | None = None
    """Likeliest tokens, if `Sampling.num_top_logprobs` asked for them; an observation or a branch drops them."""
    rehearsed: Rehearsed | None = None
    """How much of it was rehearsed and kept; engines leave it None, and a loop sets it on finished rollouts."""
    routed_experts: NDArray[np.int16] | None = None
    """int16 [P + R - 1, layers, experts per token], the experts of each token of prompt and rollout but the last, which
    no pass computed. Training replays them. None if the engine does not tell; an observation or a branch drops them."""

    def __post_init__(self) -> None:
        for name in _ARRAYS[1:]:
            values = getattr(self, name)
            if values.shape != self.tokens.shape:
                raise InputError(
                    f"{name} needs one entry per token: tokens {self.tokens.shape}, {name} {values.shape}; align them"
                )
        routes = self.routed_experts
        if routes is not None and (routes.ndim != 3 or routes.shape[0] < self.num_tokens - 1):
            raise InputError(
                f"routed_experts must be [tokens, layers, experts per token] for the prompt and {self.num_tokens} "
                f"sampled tokens, the last of which may be left out, got {list(routes.shape)}; give one row per token"
            )

    @property
    def key(self) -> RolloutKey:
        """Key of the rollout."""
        return key_of(self.prompt_id, self.draw, self.sample, self.call)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, R."""
        return int(self.tokens.size)

    def observe(self, tokens: TokenIds) -> "Rollout":
        """Append an environment's tokens, masked out of the loss.

        Raises:
            InputError: if the tokens are not a flat list of integers.

        Example: a rollout [7, 8] observing [9] has tokens [7, 8, 9] and loss_mask [1, 1, 0].
        """
        tokens = np.asarray(tokens)
        if tokens.ndim != 1 or (tokens.size > 0 and tokens.dtype.kind not in "iu"):
            raise InputError(
                f"an observation must be a one-dimensional array of token ids, got {tokens.dtype} of shape "
                f"{tokens.shape}; convert it"
            )
        num_new = tokens.size
        version = self.versions[-1:].repeat(num_new) if self.num_tokens else np.zeros(num_new, np.int32)
        return replace(
            self,
            tokens=np.concatenate([self.tokens, tokens]).astype(np.int32),
            logprobs=np.concatenate([self.logprobs, np.zeros(num_new)]),
            policy_logprobs=np.concatenate([self.policy_logprobs, np.zeros(num_new)]),
            loss_mask=np.concatenate([self.loss_mask, np.zeros(num_new, bool)]),
            versions=np.concatenate([self.versions, version]).astype(np.int32),
            top=None,
            routed_experts=None,
        )

    def branch(self, num_tokens: int, *, sample: int) -> "Rollout":
        """Return the first `num_tokens` tokens as the start of another rollout, which continues with its own noise.

        The tokens keep their log-probs, loss mask and versions. The result is the `so_far` of a request with the same
        prompt, draw and `sample`.

        Args:
            num_tokens: shared tokens, 0 to all.
            sample: index of the new rollout within the group, not used before.

        Raises:
            InputError: if `num_tokens` exceeds the rollout, or `sample` is the rollout's own index.

        Example: sample 0 with tokens [7, 8, 9] gives `branch(2, sample=4)` with tokens [7, 8], `branched_from` 0 and
        `num_shared` 2.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise InputError(
                f"num_tokens of a branch must be from 0 to the {self.num_tokens} of its rollout, got {num_tokens}; "
                "correct it"
            )
        if sample == self.sample:
            raise InputError(
                f"a branch needs its own sample index, got sample={sample} of the rollout itself; choose an unused one"
            )
        shared = slice(0, num_tokens)
        return replace(
            self,
            sample=sample,
            **{name: getattr(self, name)[shared].copy() for name in _ARRAYS},
            finish_reason=self._reason_at(num_tokens),
            reward=None,
            branched_from=self.sample,
            num_shared=num_tokens,
            top=None,
            rehearsed=None,
            routed_experts=None,
        )

    def _reason_at(self, num_tokens: int) -> FinishReason:
        """Return why the first tokens ended: "stop" if a turn ended there, else "abort", so that the turn continues."""
        if num_tokens == self.num_tokens:
            return self.finish_reason
        ends_turn = num_tokens > 0 and self.loss_mask[num_tokens - 1] and not self.loss_mask[num_tokens]
        return "stop" if ends_turn else "abort"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One rollout to sample.

    (prompt_id, draw, sample) is the rollout's key, extended by the call for calls of an episode; with the engine's seed
    and each token's position it determines the noise. Requests in an engine must not share a key. Requests with equal
    prompts share the prompt's keys and values; requests with equal prompt_id and draw are siblings.

    Example: `Request(prompt_id="q1", prompt=np.array([5, 6], np.int32), sampling=Sampling(max_tokens=8), sample=3)`
    """

    prompt_id: PromptId
    """Stable id of the prompt, the same in every epoch."""
    prompt: TokenIds
    """int32 [P], P >= 1; a list of token ids is converted."""
    sampling: Sampling
    """Sampling parameters."""
    draw: int = 0
    """Number of times that the run has scheduled this prompt before."""
    sample: int = 0
    """Index of the rollout within its group."""
    so_far: Rollout | None = None
    """The rollout of this key to continue: after an observation, an abort or a migration, or a `Rollout.branch`."""
    images: tuple[PlacedImage, ...] = ()
    """Images in order, at their placeholders in the prompt; at least one token must follow the last image."""
    call: int | None = None
    """Id of this call (`noise.call_id`) of the episode that `sample` names; None for a plain rollout."""
    rehearsed: TokenIds | None = None
    """int32 [R], the rollout's first tokens as `Engine.take_rehearsals` returned them for this key. The engine draws
    them again, many per pass; wrong ones cost time but change no result."""

    def __post_init__(self) -> None:
        self._convert(self.prompt_id, self.prompt)
        if self.rehearsed is not None:
            object.__setattr__(self, "rehearsed", _as_rehearsed(self.rehearsed))
        check_prompt(self.prompt_id, self.prompt)
        # Copied, because engines look prompts up by their tokens, and a caller may reuse its buffer.
        prompt = self.prompt.astype(np.int32)
        prompt.flags.writeable = False
        object.__setattr__(self, "prompt", prompt)
        check_images(self.prompt_id, self.images, prompt)
        if not all(_is_integer(number) and number >= 0 for number in (self.draw, self.sample)):
            raise InputError(
                f"draw and sample must be integers from 0, got {self.draw!r} and {self.sample!r}; correct them"
            )
        if self.call is not None and not _is_integer(self.call):
            raise InputError(f"a call must be an integer, got {self.call!r}; use `call_id`, or None")
        if self.so_far is not None and self.so_far.key != self.key:
            raise InputError(
                f"a request must continue the rollout of its own key, got {self.key} and a rollout of "
                f"{self.so_far.key}; use the key and prompt of the earlier request"
            )
        if self.so_far is not None and self.sampling.num_top_logprobs:
            raise InputError(
                f"top log-probs are recorded from a rollout's first token on, got num_top_logprobs="
                f"{self.sampling.num_top_logprobs} and a rollout of {self.so_far.num_tokens} tokens to continue; set 0"
            )
        if self.so_far is not None and self.so_far.num_tokens >= self.sampling.max_tokens:
            raise InputError(
                f"a rollout of {self.so_far.num_tokens} tokens has reached max_tokens="
                f"{self.sampling.max_tokens}; raise max_tokens, or keep the rollout as it is"
            )

    def _convert(self, prompt_id: object, prompt: object) -> None:
        if isinstance(prompt_id, np.integer):
            object.__setattr__(self, "prompt_id", int(prompt_id))
        if isinstance(prompt, list | tuple) and all(map(_is_integer, prompt)):
            object.__setattr__(self, "prompt", np.array(prompt, None if prompt else np.int64))

    @property
    def key(self) -> RolloutKey:
        """Key of the rollout."""
        return key_of(self.prompt_id, self.draw, self.sample, self.call)

    def unstarted(self) -> Rollout:
        """Return the rollout of a request that was aborted before it ran: only the tokens of `so_far`."""
        if self.so_far is not None:
            return replace(self.so_far, finish_reason="abort")
        return Rollout(
            prompt_id=self.prompt_id,
            draw=self.draw,
            sample=self.sample,
            call=self.call,
            tokens=np.zeros(0, np.int32),
            logprobs=np.zeros(0),
            policy_logprobs=np.zeros(0),
            loss_mask=np.zeros(0, bool),
            versions=np.zeros(0, np.int32),
            finish_reason="abort",
        )


def _as_rehearsed(tokens: object) -> TokenIds:
    found = np.asarray(tokens)
    if found.ndim != 1 or (found.size > 0 and found.dtype.kind not in "iu"):
        raise InputError(
            f"rehearsed tokens must be a one-dimensional array of token ids, got {found.dtype} of shape {found.shape}; "
            "use the result of take_rehearsals"
        )
    # An id outside the vocabulary cannot be drawn again, so verification ends before it.
    return found.clip(-1, MAX_TOKEN_ID).astype(np.int32)


def as_requests(requests: Iterable[Request]) -> list[Request]:
    """Turn an iterable of requests into a list.

    Raises:
        InputError: for a single request, or an element that is not a request.

    Example: a generator of two requests gives a list of both.
    """
    if isinstance(requests, Request) or not isinstance(requests, Iterable):
        raise InputError(f"an engine takes a list of requests, got {requests!r}; write [request] for one")
    found = list(requests)
    for request in found:
        if not isinstance(request, Request):
            raise InputError(
                f"an engine takes treering.Request records, got {request!r}; give each its prompt_id, prompt and "
                "sampling"
            )
    return found


def check_prompt(prompt_id: object, prompt: object) -> None:
    """Check a prompt id and a prompt.

    Raises:
        InputError: for an id that is neither str nor int or has lone surrogates, or a prompt that is not an integer
            array [P] of token ids.

    Example: `check_prompt("q1", np.array([5, 6], np.int32))` passes; [5, 6] and np.array([5.0]) are not prompts.
    """
    if type(prompt_id) not in (str, int):
        raise InputError(f"a prompt_id must be text or an integer, got {prompt_id!r}; convert it")
    if isinstance(prompt_id, str):
        valid_text(prompt_id, "prompt_id")
    if not isinstance(prompt, np.ndarray) or prompt.dtype.kind not in "iu":
        kind = prompt.dtype if isinstance(prompt, np.ndarray) else type(prompt).__name__
        raise InputError(f"a prompt must be an integer array of token ids, got {kind} for {prompt_id!r}; convert it")
    if prompt.ndim != 1 or prompt.size == 0:
        raise InputError(f"a prompt needs at least one token, got shape {prompt.shape}; drop {prompt_id!r}")
    if int(prompt.min()) < 0 or int(prompt.max()) > MAX_TOKEN_ID:
        raise InputError(
            f"token ids must be in [0, {MAX_TOKEN_ID}], got {prompt.min()}..{prompt.max()}; correct the prompt of "
            f"{prompt_id!r}"
        )


def check_images(prompt_id: PromptId, images: Sequence[PlacedImage], prompt: TokenIds) -> None:
    """Check that images are in order inside a prompt, and that the prompt continues after them.

    Raises:
        InputError: `check_image_positions` fails, or the last token, which rollouts compute themselves, is an image's.

    Example: an image at the end of a prompt is refused.
    """
    check_image_positions(images, prompt)
    if images and images[-1].stop == prompt.size:
        raise InputError(
            f"a prompt must continue after its images, and {prompt_id!r} ends with one; add the token that ends an "
            "image, or open the policy's turn"
        )


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


WhenRunning = Literal["finish", "abort", "reprefill"]
"""What a weight update does with running rollouts. finish: the old weights finish them first; the next step returns
them. abort: the next step returns them as they are. reprefill: they continue under the new weights, with their keys and
values computed again."""

Keeps = Literal["tokens", "distribution"]
"""What depends only on (weights, prompt, sampling, seed, key). tokens: each token of a rollout, up to near-ties of
rounding, whatever the drafts, batch, order or interruptions. distribution: the distribution of each token given those
before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts since the engine was created; subtract two with `since` to measure an interval.

    Example: 10 forwards of 8 rows that gave 240 tokens have `num_rows` 80 and 3.0 tokens per forward.
    """

    num_forwards: int = 0
    """Forward passes of the model."""
    num_rows: int = 0
    """Rollouts sampled per forward pass, summed over passes."""
    num_sampled: int = 0
    """Tokens added to rollouts by sampling."""
    num_prefilled: int = 0
    """Prompt and observed tokens whose keys and values were computed."""
    num_drafted: int = 0
    """Verified draft tokens, counted once per rollout that verified them."""
    num_accepted: int = 0
    """Draft tokens that equalled the sampled ones."""
    num_duplicate_rows: int = 0
    """Rows of `num_rows` that were sampled from the logits of another rollout with the same tokens."""
    num_rehearsed: int = 0
    """Tokens of rehearsals; other counts exclude them."""
    num_verified: int = 0
    """Rehearsed tokens that were drawn again in a prefill; drafts are not included."""
    num_kept: int = 0
    """Tokens of `num_verified` that stayed the same."""
    num_changed: int = 0
    """Rehearsals in which a token changed; the rest of each is not drawn again."""

    @property
    def tokens_per_forward(self) -> float:
        """Sampled tokens per rollout and forward pass: 1.0 without drafts; 0.0 before the first pass."""
        return self.num_sampled / self.num_rows if self.num_rows else 0.0

    @property
    def acceptance(self) -> float:
        """Accepted share of the draft tokens; 0.0 without drafts."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    def since(self, earlier: "EngineStats") -> "EngineStats":
        """Return the counts since `earlier`."""
        return EngineStats(**{name: getattr(self, name) - getattr(earlier, name) for name in self.__slots__})


GPU_ROW_PRICE = 0.4
"""`Engine.row_price` on a GPU, a cautious guess."""


class Engine(ABC):
    """Sampler of rollouts; a request's result depends only on weights, prompt, sampling, seed and key (law 5).

    Each engine declares in `keeps` how exactly.
    """

    expects_more = True
    """Whether requests may follow before those that run have ended; without, drafts are weighed row by row."""

    @property
    @abstractmethod
    def keeps(self) -> Keeps:
        """What drafts, batch, order and interruptions leave unchanged."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Policy version of the weights."""

    @property
    @abstractmethod
    def stats(self) -> EngineStats:
        """Counts so far."""

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """Number of submitted requests whose rollouts no step has returned yet."""

    @abstractmethod
    def progress(self) -> dict[RolloutKey, int]:
        """Return the tokens of each running rollout, `so_far` included; waiting requests are not in it.

        Example: {("q", 0, 3): 17} after 17 tokens of the only running rollout.
        """

    @abstractmethod
    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests, in order.

        Raises:
            InputError: for no requests, a key that is already in use, or a request that can never fit; none is queued
                then.
        """

    @abstractmethod
    def step(self) -> list[Rollout]:
        """Advance running rollouts and return the finished ones, tokens of `so_far` included; [] when idle."""

    @abstractmethod
    def peek(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return what `abort` would for running rollouts, but let them run on; ignore other keys.

        Example: `engine.peek([key])[0].branch(5, sample=9)` branches a running rollout after its first 5 tokens.
        """

    @abstractmethod
    def abort(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Remove running or waiting requests and return their partial rollouts; ignore unknown keys."""

    @abstractmethod
    def update_weights(self, version: int, when_running: WhenRunning = "finish") -> None:
        """Copy the trainer's current weights as `version` and drop all keys and values.

        If `version` is the current one, nothing changes: running rollouts, keys and values stay.

        Raises:
            InputError: if `version` is below the current one, or equal to it although the weights have changed.
        """

    def refresh_history(self) -> None:  # noqa: B027
        """Read newly published history; called after each publication, which other processes do not see themselves.

        An engine whose drafter reads the history in this process does nothing.
        """

    @property
    def row_price(self) -> float:
        """Cost of rehearsing a token and drawing it again, as a share of the cost of decoding one.

        1.0 where every token adds to the time of a pass, as on a CPU.
        """
        return 1.0

    @property
    def is_rehearsing(self) -> bool:
        """Whether `step` has rehearsals to continue."""
        return False

    def rehearse(self, requests: Iterable[Request]) -> None:  # noqa: B027
        """Sample later rollouts early, with their own noise, until the weights change.

        Rehearsals take idle rows and free memory, and give both back to the first request that needs them. No step
        returns them, and only `EngineStats.num_rehearsed` counts them. An engine without rehearsals does nothing.

        Raises:
            InputError: as `submit` does.
        """

    def take_rehearsals(self) -> dict[RolloutKey, TokenIds]:
        """End all rehearsals and return their tokens so far, for `Request.rehearsed` of the same keys.

        Example: {("q", 1, 0): [7, 8, 9]} after a request of that key was rehearsed for three tokens.
        """
        return {}

    def generate(self, requests: Iterable[Request]) -> Iterator[Rollout]:
        """Submit requests and yield each rollout when it finishes.

        Closing the iterator early aborts the remaining requests.

        Raises:
            InputError: as `submit` does.
        """
        requests = as_requests(requests)
        self.submit(requests)
        self.expects_more = False
        try:
            while self.num_unfinished:
                yield from self.step()
        finally:
            self.expects_more = True
            self.abort([request.key for request in requests])


def check_update(version: int, present: int, when_running: str) -> None:
    """Check the arguments of `update_weights` for an engine at version `present`.

    Raises:
        InputError: if `version` is below `present`.
        ConfigError: for an unknown `when_running`.
    """
    if version < present:
        raise InputError(f"policy versions must not fall, and {version} is below {present}; count every weight update")
    if when_running not in get_args(WhenRunning):
        raise ConfigError(
            f"when_running must be one of {', '.join(get_args(WhenRunning))}, got {when_running!r}; choose one"
        )
