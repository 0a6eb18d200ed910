"""Run the embedded engine: continuous batching of a Hugging Face model in this process, on CPU or CUDA.

A step admits waiting requests, drafts, runs a forward pass, samples, and returns the finished rollouts.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn

from treering.arrays import Int64Array
from treering.engine.admission import Admission, EngineSettings
from treering.engine.backends import Backend, check_decoder, make_backend
from treering.engine.batch.masked_sampling import sample_masked
from treering.engine.batch.rows import Table
from treering.engine.batch.step_inputs import (
    NOT_FINISHED,
    STOPPED,
    CommittedTokens,
    commit_tokens,
    counts_of,
    leaders_of,
    make_inputs,
)
from treering.engine.batch.token_batch import VisionSnapshot, join, prefill_chunks, with_images
from treering.engine.decoder.decoder_weights import read_weights
from treering.engine.protocol import (
    GPU_ROW_PRICE,
    Engine,
    EngineStats,
    FinishReason,
    Keeps,
    Request,
    Rollout,
    RolloutKey,
    TopLogprobs,
    WhenRunning,
    as_requests,
    check_update,
)
from treering.engine.rehearsals import Rehearsals, with_chains, without_rows
from treering.engine.speculation import Costs, ObservedCosts, Speculation, measure
from treering.engine.stop_strings import Decode
from treering.errors import ConfigError, InputError
from treering.history.budget import VerifyCosts
from treering.history.draft.drafter import Drafter
from treering.model.checks import max_positions
from treering.model.tree_model import TreeModel
from treering.train.loop.compute import fitting_threads
from treering.train.loop.compute import num_threads as threads
from treering.types import TokenIds


class TorchEngine(Engine):
    """Engine that samples rollouts of a model in this process.

    The engine computes with a snapshot of the weights, taken at the start and at each `update_weights`. Results do not
    depend on drafter, batch or order (law 5): exactly in float64, up to near-ties in float32, in distribution in
    bfloat16.

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
        costs: Costs | ObservedCosts = "measured",
    ) -> None:
        """Copy the weights and allocate the key-value arena.

        Args:
            model: a supported Hugging Face causal language model, or a PEFT model of one with LoRA, which is merged in
                the copy; the model itself is only read.
            drafter: proposes tokens for speculation; None decodes one token per row and step.
            max_batch: most rollouts that run at a time.
            max_tokens: most tokens whose keys and values are kept; prompts that rollouts share count once.
            max_prefill: most prompt and observed tokens per pass, so that decoding never waits for a long prompt.
            seed: seed of the noise.
            version: policy version of the current weights.
            decode: turns tokens into text, for stop strings.
            num_threads: torch threads during a step. None: a number that fits the model (`fitting_threads`).
            backend: which decoder to use, see `Backend`.
            costs: where pass costs come from, see `Costs` and `ObservedCosts`; not used without a drafter.

        Raises:
            ConfigError: for a limit below 1 (2 for max_tokens), or an unknown backend or source of costs.
            StateError: if the model's logits contain NaN or +inf.
            UnsupportedError: for a model that the engine would not compute exactly; the message names the difference.
        """
        self._settings = EngineSettings(
            max_batch=max_batch,
            max_tokens=max_tokens,
            max_prefill=max_prefill,
            seed=seed,
            version=version,
            num_threads=num_threads,
            backend=backend,
            costs=costs,
        )
        self._model = TreeModel.of(model)
        self._max_context = min(max_positions(self._model.model) or max_tokens, max_tokens + 1)
        self._weights = read_weights(self._model, num_positions=self._max_context)
        vision = self._model.vision
        self._vision = None if vision is None else VisionSnapshot(self._model, vision, max_tokens=max_tokens)
        made = make_backend(self._weights, max_tokens, backend, takes_images=vision is not None)
        self._decoder, self._sampler, self._backend = made.decoder, made.sampler, made.name
        # A sampled placeholder would have no image, so such a rollout could not be trained.
        self._never_sampled = () if vision is None else tuple(vision.placeholders)
        check_decoder(self._model, self._decoder, max_context=min(self._max_context, max_tokens))
        self._admission = Admission(
            vocab_size=self._model.vocab_size,
            max_context=self._max_context,
            num_slots=max_tokens,
            has_decode=decode is not None,
            vision=vision,
        )
        self._table = Table(max_rows=max_batch, allocator=made.allocator, seed=seed, move=self._decoder.move)
        self._rehearsals = Rehearsals(self._table, vocab_size=self._model.vocab_size)
        self._waiting: deque[Request] = deque()
        self._undelivered: list[Rollout] = []
        self._unfinished: set[RolloutKey] = set()
        is_cpu = self._weights.device.type == "cpu"
        # A small model's step is shorter than another process's time slice on the core, so wall time is noise.
        self._clock = time.process_time if is_cpu and isinstance(costs, ObservedCosts) else time.perf_counter
        self.shares_rows = is_cpu
        """Whether rows with equal tokens are computed once. True on CPU; on a GPU one more row costs a pass nothing."""
        self.use_drafter(drafter)
        self._decode = decode
        self._num_threads = num_threads or fitting_threads(self._model.model)
        self._version = version
        self._counts = dict.fromkeys(EngineStats.__slots__, 0)

    @property
    def version(self) -> int:
        """Policy version of the weights."""
        return self._version

    @property
    def keeps(self) -> Keeps:
        """What stays: "tokens" in float64 and float32; "distribution" below, where rounding flips some 1 % of them."""
        return "tokens" if self._weights.dtype.itemsize >= torch.float32.itemsize else "distribution"

    @property
    def stats(self) -> EngineStats:
        """Counts so far."""
        return EngineStats(**self._counts)

    @property
    def num_unfinished(self) -> int:
        """Number of submitted requests whose rollouts no step has returned yet."""
        return len(self._unfinished) + len(self._undelivered)

    @property
    def backend(self) -> str:
        """Decoder and device, such as "fused on cpu", or "plain on cuda" with the reason."""
        return self._backend

    def progress(self) -> dict[RolloutKey, int]:
        """Return the tokens of each running rollout, `so_far` included, by key."""
        return {key: count for key, count in self._table.progress().items() if key in self._unfinished}

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests, in order; stop strings need `decode`."""
        requests = as_requests(requests)
        self._admission.check(requests, self._unfinished | {rollout.key for rollout in self._undelivered})
        self._rehearsals.withdraw({request.key for request in requests})
        for request in requests:
            self._unfinished.add(request.key)
            self._table.register(request)
            self._rehearsals.expect(request)
            self._waiting.append(request)

    @property
    def row_price(self) -> float:
        """Cost of a rehearsed token relative to a decoded one."""
        return 1.0 if self.shares_rows else GPU_ROW_PRICE

    @property
    def is_rehearsing(self) -> bool:
        """Whether `step` has rehearsals to continue."""
        return bool(self._rehearsals.keys)

    def rehearse(self, requests: Iterable[Request]) -> None:
        """Sample later rollouts early, in rows and memory that nothing else needs."""
        requests = as_requests(requests)
        self._admission.check(requests, self._unfinished | self._rehearsals.keys)
        self._rehearsals.add(requests)

    def take_rehearsals(self) -> dict[RolloutKey, TokenIds]:
        """End all rehearsals and return their tokens so far."""
        return self._rehearsals.take()

    def step(self) -> list[Rollout]:
        """Advance running rollouts and return the finished ones; [] when idle."""
        while self._waiting:
            if self._table.add(self._waiting[0]):
                self._waiting.popleft()
            elif not self._rehearsals.drop():
                break
        if not self._waiting:
            self._rehearsals.start()
        ended = self._advance() if self._table.num_rows else []
        # Taken after the pass: if it fails, a later step returns them.
        finished, self._undelivered = self._undelivered, []
        return finished + ended

    def peek(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return the partial rollouts of these keys without stopping them."""
        return [self._table.rollout(row, "abort") for row in self._table.rows_of(self._unfinished.intersection(keys))]

    def abort(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Remove running or waiting requests and return their partial rollouts."""
        aborted_keys = self._unfinished.union(rollout.key for rollout in self._undelivered).intersection(keys)
        aborted = [rollout for rollout in self._undelivered if rollout.key in aborted_keys]
        self._undelivered = [rollout for rollout in self._undelivered if rollout.key not in aborted_keys]
        aborted += [self._remove_row(row, "abort") for row in self._table.rows_of(aborted_keys)]
        for request in [request for request in self._waiting if request.key in aborted_keys]:
            self._waiting.remove(request)
            self._unregister(request)
            aborted.append(request.unstarted())
        return aborted

    def update_weights(self, version: int, when_running: WhenRunning = "finish") -> None:
        """Copy the model's current weights as `version` and drop all keys and values."""
        check_update(version, self._version, when_running)
        if version == self._version:
            self._check_unchanged()
            return
        self._rehearsals.withdraw(self._rehearsals.keys)
        if when_running == "finish":
            while self._table.num_rows:
                self._undelivered += self._advance()
        elif when_running == "abort":
            rows = reversed(range(self._table.num_rows))
            self._undelivered += [self._remove_row(row, "abort") for row in rows]
        self._weights.read(self._model)
        if self._vision is not None and self._model.vision is not None:
            self._vision.read(self._model.vision)
        self._table.invalidate()
        self._version = version

    def _check_unchanged(self) -> None:
        vision = self._model.vision
        sees_same = self._vision is None or vision is None or self._vision.is_current(vision)
        if not sees_same or not self._weights.is_current(self._model):
            raise InputError(
                f"a version must name one set of weights, and the weights have changed since version {self._version}; "
                f"call update_weights({self._version + 1})"
            )

    def use_drafter(self, drafter: Drafter | None) -> None:
        """Switch to another drafter, or to none, from the next step on; results do not change."""
        if drafter is not None and not isinstance(drafter, Drafter):
            raise ConfigError(
                f"drafter must be a treering.Drafter, or None to draft nothing, got {drafter!r:.80}; pass one of these"
            )
        self.has_drafter = drafter is not None
        """Whether the engine drafts."""
        self._speculation = Speculation(drafter, vocab_size=self._model.vocab_size, costs=self._settings.costs)

    def keep_rollouts(self) -> None:
        """Keep the keys and values of finished rollouts from now on, for later turns and branches.

        The first request that continues a rollout, or is a call of an episode, does the same.
        """
        self._table.keeps_rollouts = True

    def measure_costs(self) -> VerifyCosts:
        """Measure the seconds of a pass by its number of tokens; no rollout, count or noise changes.

        Takes a few tenths of a second, or about fifty passes if these are slow. With costs="measured" and a drafter
        without costs, the engine calls this before its first pass.

        Raises:
            StateError: if the model's logits contain NaN or +inf.

        Example: with max_batch=2 the result has entries for 1 to 10 and for 16 tokens.
        """
        with threads(self._num_threads):
            return measure(
                self._decoder,
                self._sampler,
                num_slots=self._settings.max_tokens,
                max_batch=self._settings.max_batch,
                context=min(self._table.typical_context(), self._max_context),
            )

    def _advance(self) -> list[Rollout]:
        """Run one pass over the running rows; if it fails, mark all keys and values as not computed."""
        try:
            with threads(self._num_threads):
                return self._run_pass()
        except BaseException:
            # Prompts are marked as computed, and drafts as moved, before the pass that does the work.
            self._table.invalidate()
            raise

    def _run_pass(self) -> list[Rollout]:
        started = self._clock()
        table = self._table
        if self._speculation.wants_costs:
            self._speculation.use_costs(self.measure_costs())
        table.copy_awaited()
        chunks = prefill_chunks(table.prefixes.incomplete(), self._settings.max_prefill)
        if chunks:
            # A pass writes all keys before any token reads them, so a row can join the last chunk of its prefix.
            table.mark_ready()
        num_prefilled = sum(chunk.num_tokens for chunk in chunks)
        leaders = leaders_of(table.columns, table.num_rows) if self.shares_rows else np.arange(table.num_rows)
        is_early, chains = (
            self._rehearsals.is_early(),
            self._rehearsals.chains(self._settings.max_prefill - num_prefilled),
        )
        has_chain = np.zeros(table.num_rows, bool)
        has_chain[list(chains)] = True
        # A row with rehearsed tokens leads itself: only its own logits follow them.
        leaders[has_chain] = np.flatnonzero(has_chain)
        is_alone = not chains and not is_early.any()
        is_steady = is_alone and not chunks
        drafts = self._speculation.propose(
            table,
            leaders,
            has_prefill=not is_steady or table.has_missing(),
            without=None if is_alone else is_early | has_chain,
            is_last=not self.expects_more and not self._waiting and is_alone,
        )
        proposed = with_chains(drafts, chains) if chains else drafts
        num_verified = sum(chain.size for chain in chains.values())
        inputs = make_inputs(
            table.columns, leaders, self._settings.max_prefill - num_prefilled - num_verified, proposed
        )
        start = self._clock()
        batch = join(inputs.batch, chunks)
        if self._vision is not None:
            batch = with_images(batch, chunks, table, self._vision)
        logits = self._decoder.run(batch)
        tops: dict[int, TopLogprobs] = {}
        c, rows = table.columns, inputs.rows
        if self._never_sampled or c.num_top[rows].any() or (c.num_tokens[rows] < c.first_end[rows]).any():
            verified, tops = sample_masked(self._sampler, logits, inputs, c, proposed, never=self._never_sampled)
        else:
            verified = self._sampler(logits, inputs, c, proposed)
        if is_steady:
            self._speculation.note_pass(inputs.batch.num_tokens, self._clock() - start)
        num_tokens = table.columns.num_tokens[inputs.rows]
        committed = commit_tokens(table.columns, inputs, self._version, *verified)
        try:
            if committed.sources.size:
                self._decoder.move(committed.sources, committed.targets)
            own = committed if is_alone else without_rows(committed, has_chain[leaders] | is_early)
            self._speculation.give_feedback(own)
            reasons = self._finish_reasons(inputs.rows, committed)
        except BaseException:
            # Undo the commit; sampling again gives the same tokens.
            table.columns.num_tokens[inputs.rows] = num_tokens
            raise
        for index, top in tops.items():
            table.note_top(int(inputs.rows[index]), top, int(committed.num_new[index]))
        counts = counts_of(inputs, own, drafts, num_prefilled, is_early)
        counts |= self._rehearsals.note_pass(inputs.rows, num_tokens, chains)._asdict()
        for name, count in counts.items():
            self._counts[name] += count
        if counts["num_prefilled"] == 0 and is_steady:
            self._speculation.note_step(committed, num_waiting=len(self._waiting), seconds=self._clock() - started)
        # Last row first, so that the row which takes a removed one's place has been handled already.
        ended = [self._remove_row(row, reason) for row, reason in reversed(reasons.items())][::-1]
        return [rollout for rollout in ended if not self._rehearsals.note_ended(rollout)]

    def _finish_reasons(self, rows: Int64Array, committed: CommittedTokens) -> dict[int, FinishReason]:
        """Return why rows have finished, by row; drop tokens after a stop string."""
        reasons: dict[int, FinishReason] = {}
        columns = rows.tolist(), committed.finish.tolist(), committed.num_new.tolist()
        for row, finish, num_new in zip(*columns, strict=True):
            if self._decode is not None and self._table.truncate_at_stop(row, num_new, self._decode):
                finish = STOPPED
            if finish != NOT_FINISHED:
                reasons[row] = "stop" if finish == STOPPED else "length"
        return reasons

    def _remove_row(self, row: int, reason: FinishReason) -> Rollout:
        rollout = self._table.rollout(row, reason)
        self._unregister(self._table.remove(row))
        return rollout

    def _unregister(self, request: Request) -> None:
        self._unfinished.discard(request.key)
        self._rehearsals.forget(request)
        self._table.prefixes.unregister(self._table.keys.of(request))
