"""Refuse requests that an engine cannot run, before it queues them, and invalid settings."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from treering.engine.backends import Backend
from treering.engine.protocol import Request, RolloutKey
from treering.engine.speculation import Costs, ObservedCosts
from treering.errors import ConfigError, InputError
from treering.model.checks import check_positions
from treering.model.images import VisionPart
from treering.tree.forest import Forest
from treering.types import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Checked settings of a `TorchEngine`, whose constructor describes them.

    Raises:
        ConfigError: a limit below 1 (2 for max_tokens), a negative version, a limit that is not a whole number, or
            invalid `costs`.
    """

    max_batch: int
    max_tokens: int
    max_prefill: int
    seed: int
    version: int
    num_threads: int | None
    backend: Backend
    costs: Costs | ObservedCosts

    def __post_init__(self) -> None:
        for name, least in (("max_batch", 1), ("max_tokens", 2), ("max_prefill", 1), ("version", 0), ("seed", None)):
            _check_integer(name, getattr(self, name), least=least)
        if self.num_threads is not None:
            _check_integer("num_threads", self.num_threads, least=1)
        if not isinstance(self.costs, ObservedCosts) and self.costs not in ("measured", "none"):
            raise ConfigError(
                f'costs must be "measured", "none" or an ObservedCosts, got {self.costs!r}; choose one, and give known '
                "costs to the drafter (use_costs)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Limits of one engine.

    Example: with 50 slots, a prompt of 2 tokens and max_tokens=49 is accepted because it needs 50; 50 is refused.
    """

    vocab_size: int
    """Number of token ids."""
    max_context: int
    """Number of positions that the model supports."""
    num_slots: int
    """Number of tokens whose keys and values fit."""
    has_decode: bool
    """Whether the engine decodes tokens to text."""
    vision: VisionPart | None = None
    """Checks the images of a request; None if the model reads only text."""

    def check(self, requests: Sequence[Request], taken: Set[RolloutKey]) -> None:
        """Check that every request can run and that its key is unique and not in `taken`.

        Raises:
            InputError: for the first request that fails, with the reason.
        """
        seen = set(taken)
        for request in requests:
            if request.key in seen:
                raise InputError(
                    f"(prompt_id, draw, sample) must be unique, and {request.key} is already in use; number "
                    "the samples within a group, and the draws of a prompt"
                )
            seen.add(request.key)
            self._check_tokens(request)
            self._check_length(request)
            self._check_images(request)
            hidden = {token for token in request.sampling.stop_tokens if token < self.vocab_size}
            if request.sampling.min_tokens and len(hidden) == self.vocab_size:
                raise InputError(
                    f"min_tokens={request.sampling.min_tokens} leaves no token to sample, as all {self.vocab_size} are "
                    "stop tokens; remove some"
                )
            if request.sampling.stop_strings and not self.has_decode:
                raise InputError(
                    f"stop strings need a decoder, and this engine has none for {request.sampling.stop_strings}; "
                    "give it decode=tokenizer.decode"
                )

    def _check_tokens(self, request: Request) -> None:
        parts: list[tuple[str, TokenIds]] = [("prompt", request.prompt)]
        if request.so_far is not None and request.so_far.num_tokens:
            parts.append(("so_far of prompt", request.so_far.tokens))
        for name, tokens in parts:
            least, largest = int(tokens.min()), int(tokens.max())
            if least < 0 or largest >= self.vocab_size:
                raise InputError(
                    f"{name} {request.prompt_id!r} has token id {least if least < 0 else largest}, but the model's "
                    f"ids are 0 to {self.vocab_size - 1}: is this the tokenizer of another model?"
                )

    def _check_length(self, request: Request) -> None:
        num_prompt, max_tokens = request.prompt.size, request.sampling.max_tokens
        needed = num_positions_of(request.prompt, max_tokens)
        if needed > self.num_slots:
            raise InputError(
                f"a prompt of {num_prompt} tokens and max_tokens={max_tokens} need {needed} key-value slots, but the "
                f"engine has {self.num_slots}; raise the engine's max_tokens, or shorten the prompt or its max_tokens"
            )
        check_context(request.prompt, max_tokens, self.max_context)

    def _check_images(self, request: Request) -> None:
        if self.vision is not None:
            self.vision.check(Forest.from_sequences([request.prompt], images=[request.images]))
        elif request.images:
            raise InputError(
                f"prompt {request.prompt_id!r} has images ({len(request.images)}), and this engine and its model "
                "read only text; use the embedded engine with a model that takes images"
            )


def check_context(prompt: TokenIds, max_tokens: int, max_context: int | None) -> None:
    """Check that a prompt's rollouts stay within the positions that the model supports; None sets no limit.

    Raises:
        InputError: if they could exceed it.

    Example: a prompt of 9 tokens with max_tokens=8 needs 16 positions.
    """
    check_positions(
        num_positions_of(prompt, max_tokens),
        max_context,
        what=f"a prompt of {prompt.size} tokens with max_tokens={max_tokens}",
        fix="shorten either",
    )


def num_positions_of(prompt: TokenIds, max_tokens: int) -> int:
    """Return the largest number of positions that a rollout needs; its last token is never computed.

    Example: 16 for a prompt of 9 tokens and max_tokens=8.
    """
    return int(prompt.size) - 1 + max_tokens


def _check_integer(name: str, value: object, *, least: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ConfigError(f"{name} of an engine must be a whole number, got {value!r}; correct it")
    if least is not None and value < least:
        raise ConfigError(f"{name} of an engine must be at least {least}, got {value}; raise it")
