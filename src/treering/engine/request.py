"""An engine's request: a prompt, its key, the sampling parameters, and optionally a rollout to continue."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from treering.data.picture import PlacedPicture, check_places
from treering.data.unicode import valid_text
from treering.engine.rollout import Rollout, RolloutKey, key_of
from treering.errors import ConfigError, InputError
from treering.types import MAX_TOKEN_ID, PromptId, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters and stop conditions.

    The distribution is the softmax of the logits over `temperature`, cut to the `top_k` likeliest tokens, then to the
    fewest likeliest tokens whose mass reaches `top_p`, then to the tokens at least `min_p` times as likely as the
    likeliest, and renormalised. `repetition_penalty` changes the logits before all of this. The order and the
    definitions are those of Hugging Face's `generate`.

    `Rollout.logprobs` are of this distribution, `Rollout.policy_logprobs` of the logits over `temperature` alone:
    neither a cut nor a penalty counts there.

    Example: logits [2, 1, 0] at temperature 1 have the probabilities [0.665, 0.245, 0.090]; top_p=0.7 keeps the first
    two as [0.731, 0.269], top_k=1 the first alone, min_p=0.3 the first two.
    """

    max_tokens: int
    """Longest rollout in tokens, an environment's included."""
    temperature: float = 1.0
    """Divides the logits; > 0. For the likeliest token always, set top_k=1."""
    top_k: int | None = None
    """Number of tokens to draw from; None or 0 is all."""
    top_p: float = 1.0
    """Probability mass to draw from, in (0, 1]."""
    min_p: float = 0.0
    """Least probability to draw, as a share of the likeliest token's, in [0, 1]; 0 is all."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that prompt or rollout contain, and multiplies the negative ones; > 0. 1.0
    changes nothing."""
    stop_tokens: tuple[int, ...] = ()
    """Any of these ends a rollout; it stays in the rollout as the last token."""
    stop_strings: tuple[str, ...] = ()
    """A rollout ends with the token that completes one of these; needs an engine with a tokenizer."""

    def __post_init__(self) -> None:
        if not _is_integer(self.max_tokens) or not 1 <= self.max_tokens <= MAX_TOKEN_ID:
            raise ConfigError(
                f"max_tokens is at least 1, got max_tokens={self.max_tokens!r}; give a whole number above 0"
            )
        if not _is_number(self.temperature) or not 0 < self.temperature < float("inf"):
            raise ConfigError(
                f"temperature is a positive number, got {self.temperature!r}; for the likeliest token set top_k=1"
            )
        if self.top_k is not None and (not _is_integer(self.top_k) or not 0 <= self.top_k <= MAX_TOKEN_ID):
            raise ConfigError(f"top_k is a whole number, at least 0, got {self.top_k!r}; None or 0 keeps all tokens")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p lies in (0, 1], got {self.top_p!r}; 1.0 keeps all tokens")
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p lies in [0, 1], got {self.min_p!r}; 0.0 keeps all tokens")
        if not _is_number(self.repetition_penalty) or not 0 < self.repetition_penalty < float("inf"):
            raise ConfigError(
                f"repetition_penalty is a positive number, got {self.repetition_penalty!r}; 1.0 penalises nothing"
            )
        self._check_stops()

    def _check_stops(self) -> None:
        for name in ("stop_tokens", "stop_strings"):
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        # A str is a sequence of str too: each of its characters would end a rollout.
        if not isinstance(self.stop_strings, tuple) or not all(isinstance(stop, str) for stop in self.stop_strings):
            raise ConfigError(f'stop_strings is a tuple of texts, got {self.stop_strings!r}; write ("END",), for one')
        if "" in self.stop_strings:
            raise ConfigError('a stop string holds at least one character, got ""; remove it')
        is_tuple = isinstance(self.stop_tokens, tuple)
        if not is_tuple or not all(_is_integer(stop) and 0 <= stop <= MAX_TOKEN_ID for stop in self.stop_tokens):
            raise ConfigError(
                f"stop_tokens is a tuple of token ids in [0, {MAX_TOKEN_ID}], got {self.stop_tokens!r}; write (2,), "
                "for one"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One rollout to sample.

    (prompt_id, draw, sample) is the rollout's key, with the call for one of an episode's calls: with the engine's seed
    and each token's position it determines the noise. Two requests in an engine must not share a key. Requests with
    equal prompts share the prompt's keys and values; requests with equal prompt_id and draw are siblings.

    Example: `Request(prompt_id="q1", prompt=np.array([5, 6], np.int32), sampling=Sampling(max_tokens=8), sample=3)`
    """

    prompt_id: PromptId
    """See `PromptId`."""
    prompt: TokenIds
    """int32 [P], P >= 1; a list of token ids is converted."""
    sampling: Sampling
    """Sampling parameters."""
    draw: int = 0
    """How many times the run has scheduled this prompt before."""
    sample: int = 0
    """Index of the rollout within its group."""
    so_far: Rollout | None = None
    """The rollout of this key to continue: after an observation, an abort or a migration, or a `Rollout.branch`."""
    pictures: tuple[PlacedPicture, ...] = ()
    """In order, at the model's own placeholders in the prompt, which goes on after the last one."""
    call: int | None = None
    """Of an episode, which sample then names, the id of this call (`noise.call_id`); None for a rollout by itself."""

    def __post_init__(self) -> None:
        self._convert(self.prompt_id, self.prompt)
        check_prompt(self.prompt_id, self.prompt)
        # A copy: engines look prompts up by their tokens while these run, and callers reuse their buffers.
        prompt = self.prompt.astype(np.int32)
        prompt.flags.writeable = False
        object.__setattr__(self, "prompt", prompt)
        check_pictures(self.prompt_id, self.pictures, prompt)
        if not all(_is_integer(number) and number >= 0 for number in (self.draw, self.sample)):
            raise InputError(f"draw and sample count from 0, got {self.draw!r} and {self.sample!r}; correct them")
        if self.call is not None and not _is_integer(self.call):
            raise InputError(f"a call is named by an integer, got {self.call!r}; take `call_id`, or None")
        if self.so_far is not None and self.so_far.key != self.key:
            raise InputError(
                f"a request continues the rollout of its own key, got {self.key} and a rollout of {self.so_far.key}; "
                "take key and prompt from the request before"
            )
        if self.so_far is not None and self.so_far.num_tokens >= self.sampling.max_tokens:
            raise InputError(
                f"a rollout of {self.so_far.num_tokens} tokens has reached max_tokens="
                f"{self.sampling.max_tokens}; raise max_tokens, or keep the rollout as it is"
            )

    def _convert(self, prompt_id: object, prompt: object) -> None:
        """Converts numpy integers to Python's, and a list of token ids to an array."""
        if isinstance(prompt_id, np.integer):
            object.__setattr__(self, "prompt_id", int(prompt_id))
        if isinstance(prompt, list | tuple) and all(map(_is_integer, prompt)):
            object.__setattr__(self, "prompt", np.array(prompt, None if prompt else np.int64))

    @property
    def key(self) -> RolloutKey:
        """See `RolloutKey`."""
        return key_of(self.prompt_id, self.draw, self.sample, self.call)

    def unstarted(self) -> Rollout:
        """The rollout of a request aborted before it ran: only the tokens of `so_far`."""
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


def as_requests(requests: Iterable[Request]) -> list[Request]:
    """Turns an iterable of requests into a list.

    Raises:
        InputError: a single request, or an element that is not a request.

    Example: a generator of two requests gives a list of both.
    """
    if isinstance(requests, Request) or not isinstance(requests, Iterable):
        raise InputError(f"an engine takes requests, one or more in a list, got {requests!r}; write [request] for one")
    found = list(requests)
    for request in found:
        if not isinstance(request, Request):
            raise InputError(
                f"an engine takes treering.Request records, got {request!r}; give each its prompt_id, prompt and "
                "sampling"
            )
    return found


def check_prompt(prompt_id: object, prompt: object) -> None:
    """Checks a prompt id and a prompt.

    Raises:
        InputError: an id that is neither str nor int or has lone surrogates, or a prompt that is not an integer array
            [P] of token ids.

    Example: `check_prompt("q1", np.array([5, 6], np.int32))` passes; [5, 6] and np.array([5.0]) are not prompts.
    """
    if type(prompt_id) not in (str, int):
        raise InputError(f"a prompt_id is text or an integer, got {prompt_id!r}; convert it")
    if isinstance(prompt_id, str):
        valid_text(prompt_id, "prompt_id")
    if not isinstance(prompt, np.ndarray) or prompt.dtype.kind not in "iu":
        kind = prompt.dtype if isinstance(prompt, np.ndarray) else type(prompt).__name__
        raise InputError(f"a prompt is an integer array of token ids, got {kind} for {prompt_id!r}; convert it")
    if prompt.ndim != 1 or prompt.size == 0:
        raise InputError(f"a prompt holds at least one token, got shape {prompt.shape}; drop {prompt_id!r}")
    if int(prompt.min()) < 0 or int(prompt.max()) > MAX_TOKEN_ID:
        raise InputError(
            f"token ids lie in [0, {MAX_TOKEN_ID}], got {prompt.min()}..{prompt.max()}; correct the prompt of "
            f"{prompt_id!r}"
        )


def check_pictures(prompt_id: PromptId, pictures: Sequence[PlacedPicture], prompt: TokenIds) -> None:
    """Checks that pictures stand in order inside a prompt, and that it goes on after them.

    Raises:
        InputError: see `check_places`; or the last token, which every rollout computes itself, is of a picture.

    Example: a picture at the last tokens of a prompt is refused.
    """
    check_places(pictures, prompt)
    if pictures and pictures[-1].stop == prompt.size:
        raise InputError(
            f"a prompt goes on after its pictures, and {prompt_id!r} ends with one; put the token that ends a "
            "picture after it, or open the policy's turn"
        )


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) or isinstance(value, float | np.floating)
