"""The embedded engine: continuous batching of a Hugging Face model in this process, on CPU or CUDA.

Owns the queue, the table and the order of a step: admit, draft, compute, draw, collect. How tokens are computed, drawn
and drafted is the business of the files of these names.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import get_args

import numpy as np
from torch import nn

from treering.engine.admission import Admission
from treering.engine.backends import Backend, make_decoder, name_of
from treering.engine.decoder_check import check_decoder
from treering.engine.drawing import draw
from treering.engine.prefill import join, plan_chunks
from treering.engine.protocol import Engine, EngineStats, WhenRunning
from treering.engine.request import Request
from treering.engine.rollout import FinishReason, Rollout, RolloutKey
from treering.engine.rows import NOT_FINISHED, STOPPED, Gains, Work, plan_pass, take_gains
from treering.engine.speculation import Speculation
from treering.engine.stop_strings import Decode, first_stop, turn_start
from treering.engine.table import Table
from treering.engine.weights import read_weights
from treering.errors import ConfigError, InputError
from treering.history.draft import Drafter
from treering.model.families import find_parts
from treering.train.compute import num_threads as threads


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
            ConfigError: a limit below 1 (2 for max_tokens), or an unknown backend.
            StateError: the model's logits hold NaN or +inf.
            UnsupportedError: a model that the engine would not compute exactly, by name.
        """
        _check_integer("max_batch", max_batch, least=1)
        _check_integer("max_tokens", max_tokens, least=2)
        _check_integer("max_prefill", max_prefill, least=1)
        _check_integer("version", version, least=0)
        _check_integer("seed", seed, least=None)
        if num_threads is not None:
            _check_integer("num_threads", num_threads, least=1)
        if drafter is not None and not isinstance(drafter, Drafter):
            raise ConfigError(f"drafter is a treering.Drafter, or None to draft nothing, got {drafter!r}; make one")
        self._parts = find_parts(model)
        vocab_size = self._parts.vocab_size
        limit = getattr(self._parts.config, "max_position_embeddings", None) or max_tokens
        max_context = min(int(limit), max_tokens + 1)
        self._weights = read_weights(self._parts, num_positions=max_context)
        self._decoder = make_decoder(self._weights, max_tokens, backend)
        check_decoder(model, self._decoder, vocab_size=vocab_size, max_context=min(max_context, max_tokens))
        self._admission = Admission(
            vocab_size=vocab_size, max_context=max_context, num_slots=max_tokens, has_decode=decode is not None
        )
        self._table = Table(max_rows=max_batch, num_slots=max_tokens, seed=seed)
        self._waiting: deque[Request] = deque()
        self._undelivered: list[Rollout] = []
        self._unfinished: set[RolloutKey] = set()
        self._speculation = Speculation(drafter, vocab_size=vocab_size)
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
        return f"{name_of(self._decoder)} on {self._weights.device.type}"

    def submit(self, requests: Iterable[Request]) -> None:
        """See `Engine.submit`; stop strings need `decode`."""
        requests = list(requests)
        self._admission.check(requests, self._unfinished | {rollout.key for rollout in self._undelivered})
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
        with threads(self._num_threads):
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
            raise ConfigError(
                f"when_running is one of {', '.join(get_args(WhenRunning))}, got {when_running!r}; choose one"
            )
        if when_running == "finish":
            with threads(self._num_threads):
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
        sampled = columns.tokens[row, columns.num_prompt[row] + turn_start(request.so_far) : columns.num_tokens[row]]
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


def _check_integer(name: str, value: object, *, least: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ConfigError(f"{name} of an engine is a whole number, got {value!r}; correct it")
    if least is not None and value < least:
        raise ConfigError(f"{name} of an engine is at least {least}, got {value}; raise it")
