"""The embedded engine: continuous batching of a Hugging Face model in this process, on CPU or CUDA.

Owns the queue, the table and the order of a step: admit, draft, compute, draw, collect. How tokens are computed, drawn
and drafted is the business of the files of these names.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import nn

from treering.engine.decoder import Decoder
from treering.engine.decoder_check import check_decoder
from treering.engine.decoder_cpu import CpuDecoder, supports
from treering.engine.decoder_torch import TorchDecoder
from treering.engine.drawing import draw
from treering.engine.prefill import join, plan_chunks
from treering.engine.protocol import Engine, EngineStats, WhenRunning
from treering.engine.request import Request
from treering.engine.rollout import FinishReason, Rollout, RolloutKey
from treering.engine.rows import NOT_FINISHED, STOPPED, Gains, Work, plan_pass, take_gains
from treering.engine.speculation import Speculation
from treering.engine.stop_strings import Decode, first_stop
from treering.engine.table import Table
from treering.engine.weights import DecoderWeights, read_weights
from treering.errors import ConfigError, InputError, UnsupportedError
from treering.history.draft import Drafter
from treering.model.families import find_parts

Backend = Literal["auto", "fused", "plain"]
"""fused: the CPU path, for float32 and float64. plain: torch operations, for any device. auto: fused if it can be."""


class TorchEngine(Engine):
    """Samples rollouts of a model that lives in this process.

    The engine computes with a snapshot of the weights, taken now and at each `update_weights`. Results do not depend on
    drafter, batch or order (law 5): exactly in float64, up to near-ties in float32, in distribution in bfloat16.

    Example:
        >>> engine = TorchEngine(model, max_batch=8)                                             # doctest: +SKIP
        >>> request = Request(prompt_id="q", prompt=prompt, sampling=Sampling(max_tokens=64))    # doctest: +SKIP
        >>> for rollout in engine.generate([request]):                                           # doctest: +SKIP
        ...     print(rollout.tokens, rollout.logprobs.sum())
    """

    def __init__(
        self,
        model: nn.Module,
        drafter: Drafter | None = None,
        *,
        max_batch: int = 16,
        max_tokens: int = 16384,
        max_prefill: int = 512,
        seed: int = 0,
        version: int = 0,
        decode: Decode | None = None,
        num_threads: int | None = None,
        backend: Backend = "auto",
    ) -> None:
        """Reads the weights and makes room.

        Args:
            model: a supported Hugging Face causal language model; adapters merged.
            drafter: proposes tokens for speculation; None decodes one token per row and step.
            max_batch: rollouts that run at one time.
            max_tokens: tokens whose keys and values fit, prompts that rollouts share counted once.
            max_prefill: prompt and observed tokens per pass at most, so that decoding never waits for a long prompt.
            seed: of the noise.
            version: policy version of the present weights.
            decode: tokens to text, for stop strings.
            num_threads: torch threads during a step; None leaves them as they are. One is best for small models.
            backend: see `Backend`.

        Raises:
            ConfigError: a limit below 1 or an unknown backend.
            UnsupportedError: a model that the engine would not compute exactly, by name.
        """
        _check_limits(max_batch=max_batch, max_tokens=max_tokens, max_prefill=max_prefill)
        self._parts = find_parts(model)
        limit = getattr(self._parts.config, "max_position_embeddings", None) or max_tokens
        self._max_context = min(int(limit), max_tokens + 1)
        self._weights = read_weights(self._parts, num_positions=self._max_context)
        self._decoder = _make_decoder(self._weights, max_tokens, backend)
        check_decoder(model, self._decoder, vocab_size=self._parts.vocab_size)
        self._table = Table(max_rows=max_batch, num_slots=max_tokens, seed=seed)
        self._waiting: deque[Request] = deque()
        self._undelivered: list[Rollout] = []
        self._unfinished: set[RolloutKey] = set()
        self._speculation = Speculation(drafter)
        self._decode = decode
        self._max_prefill = max_prefill
        self._num_threads = num_threads
        self._version = version
        self._counts = dict.fromkeys(EngineStats.__slots__, 0)

    @property
    def version(self) -> int:
        """See `Engine.version`."""
        return self._version

    @property
    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return EngineStats(**self._counts)

    @property
    def num_unfinished(self) -> int:
        """See `Engine.num_unfinished`."""
        return len(self._unfinished) + len(self._undelivered)

    @property
    def backend(self) -> str:
        """Which decoder runs, and where: "fused on cpu" or "plain on cuda", for instance."""
        name = "fused" if isinstance(self._decoder, CpuDecoder) else "plain"
        return f"{name} on {self._weights.device.type}"

    def submit(self, requests: Iterable[Request]) -> None:
        """See `Engine.submit`; stop strings need `decode`."""
        requests = list(requests)
        self._check(requests)
        for request in requests:
            self._unfinished.add(request.key)
            self._table.prefixes.expect(request.prompt)
            self._waiting.append(request)

    def step(self) -> list[Rollout]:
        """See `Engine.step`."""
        finished, self._undelivered = self._undelivered, []
        while self._waiting and self._table.add(self._waiting[0]):
            self._waiting.popleft()
        if self._table.num_rows == 0:
            return finished
        with self._threads():
            return finished + self._advance()

    def abort(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """See `Engine.abort`."""
        gone = set(keys)
        aborted = [rollout for rollout in self._undelivered if rollout.key in gone]
        self._undelivered = [rollout for rollout in self._undelivered if rollout.key not in gone]
        aborted += [self._take_out(row, "abort") for row in self._table.rows_of(gone)]
        for request in [request for request in self._waiting if request.key in gone]:
            self._waiting.remove(request)
            self._leave(request)
            aborted.append(request.unstarted())
        return aborted

    def update_weights(self, version: int, when_running: WhenRunning = "finish") -> None:
        """See `Engine.update_weights`."""
        if version <= self._version:
            raise InputError(
                f"policy versions rise, and {version} is not above {self._version}; count every weight update"
            )
        if when_running not in get_args(WhenRunning):
            raise ConfigError(f"when_running is one of {', '.join(get_args(WhenRunning))}, got {when_running!r}")
        if when_running == "finish":
            with self._threads():
                while self._table.num_rows:
                    self._undelivered += self._advance()
        elif when_running == "abort":
            rows = reversed(range(self._table.num_rows))
            self._undelivered += [self._take_out(row, "abort") for row in rows]
        self._weights.read(self._parts)
        self._table.forget_values()
        self._version = version

    def _advance(self) -> list[Rollout]:
        """One pass over the running rows."""
        table = self._table
        chunks = plan_chunks(table.prefixes.incomplete(), self._max_prefill)
        for chunk in chunks:
            chunk.complete()
        if chunks:
            # A pass writes all keys before any token reads, so rows may already run with the last chunk of a prefix.
            table.mark_ready()
        num_prefilled = sum(chunk.num_tokens for chunk in chunks)
        drafts, offsets = self._speculation.propose(table)
        work = plan_pass(table.columns, table.num_rows, self._max_prefill - num_prefilled, drafts, offsets)
        logits = self._decoder.run(join(work, chunks))
        drawn = draw(logits, work, table.columns, drafts, offsets)
        gains = take_gains(table.columns, work, self._version, *drawn)
        self._speculation.learn(work, drawn, gains)
        self._count(work, gains, drafts.size, num_prefilled)
        return self._collect(work, gains)

    def _collect(self, work: Work, gains: Gains) -> list[Rollout]:
        """Takes out the rows that finished, last one first, so that removing one moves none that is still to come."""
        finished = []
        for index in reversed(range(work.rows.size)):
            row, finish = int(work.rows[index]), int(gains.finish[index])
            if self._table.requests[row].sampling.stop_strings:
                finish = self._look_for_strings(row, int(gains.num_new[index]), finish)
            if finish != NOT_FINISHED:
                finished.append(self._take_out(row, "stop" if finish == STOPPED else "length"))
        return finished[::-1]

    def _look_for_strings(self, row: int, num_new: int, finish: int) -> int:
        columns, request = self._table.columns, self._table.requests[row]
        assert self._decode is not None
        earlier = 0 if request.so_far is None else request.so_far.num_tokens
        sampled = columns.tokens[row, columns.num_prompt[row] + earlier : columns.num_tokens[row]]
        stays = first_stop(sampled, num_new, request.sampling.stop_strings, self._decode)
        if stays is None:
            return finish
        columns.num_tokens[row] -= num_new - stays
        return STOPPED

    def _take_out(self, row: int, reason: FinishReason) -> Rollout:
        rollout = self._table.rollout(row, reason)
        self._leave(self._table.remove(row))
        return rollout

    def _leave(self, request: Request) -> None:
        self._unfinished.remove(request.key)
        self._table.prefixes.release(request.prompt)

    def _count(self, work: Work, gains: Gains, num_drafted: int, num_prefilled: int) -> None:
        gained = {
            "num_forwards": 1,
            "num_rows": work.rows.size,
            "num_sampled": int(gains.num_new.sum()),
            "num_prefilled": num_prefilled + int(work.num_fed.sum()) - work.rows.size,
            "num_drafted": num_drafted,
            "num_accepted": int(gains.num_accepted.sum()),
        }
        for name, count in gained.items():
            self._counts[name] += count

    def _check(self, requests: Sequence[Request]) -> None:
        seen = self._unfinished | {rollout.key for rollout in self._undelivered}
        for request in requests:
            if request.key in seen:
                raise InputError(
                    f"(prompt_id, draw, sample) names one rollout, and {request.key} is there already; count samples "
                    "within a group, and draws of a prompt"
                )
            seen.add(request.key)
            self._table.check_fits(request)
            self._check_request(request)

    def _check_request(self, request: Request) -> None:
        vocab_size, largest = self._weights.sizes.vocab_size, int(request.prompt.max())
        if largest >= vocab_size:
            raise InputError(
                f"prompt {request.prompt_id!r} holds token id {largest}, and the model has {vocab_size}: is this the "
                "tokenizer of another model?"
            )
        if request.prompt.size + request.sampling.max_tokens > self._max_context + 1:
            raise InputError(
                f"the model reads {self._max_context} positions, and a prompt of {request.prompt.size} tokens with "
                f"max_tokens={request.sampling.max_tokens} goes beyond; shorten either"
            )
        if request.sampling.stop_strings and self._decode is None:
            raise InputError("stop strings need tokens as text; give the engine decode=tokenizer.decode")

    @contextmanager
    def _threads(self) -> Iterator[None]:
        if self._num_threads is None:
            yield
            return
        before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _make_decoder(weights: DecoderWeights, num_slots: int, backend: Backend) -> Decoder:
    if backend not in get_args(Backend):
        raise ConfigError(f"backend is one of {', '.join(get_args(Backend))}, got {backend!r}")
    if backend == "fused" and not supports(weights):
        raise UnsupportedError(
            f"the fused backend computes float32 and float64 on cpu, and the model is {weights.dtype} on "
            f'{weights.device}; use backend="auto"'
        )
    fused = backend != "plain" and supports(weights)
    return CpuDecoder(weights, num_slots) if fused else TorchDecoder(weights, num_slots)


def _check_limits(**limits: int) -> None:
    for name, value in limits.items():
        if value < 1:
            raise ConfigError(f"{name} is at least 1, got {value}; raise it")
