"""Run vLLM as an engine of the loop: vLLM schedules, computes and verifies behind the engine protocol.

The engine admits only as many requests as can run at a time, so that it knows which ones run. A vLLM request belongs to
one policy version: an update ends the running requests and, if asked to, continues them as new ones.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import nn

from treering.engine.admission import Admission
from treering.engine.protocol import (
    GPU_ROW_PRICE,
    Engine,
    EngineStats,
    FinishReason,
    Keeps,
    Request,
    Rollout,
    RolloutKey,
    WhenRunning,
    as_requests,
    check_update,
)
from treering.engine.stop_strings import Decode
from treering.errors import ConfigError, InputError, StateError
from treering.history.draft.drafter import Drafter
from treering.integrations.vllm.llm import (
    Verification,
    check_engine_settings,
    check_llm,
    checkpoint_of,
    fingerprint,
    has_proposer,
    routed_layers,
    set_verification,
)
from treering.integrations.vllm.llm_requests import (
    Counts,
    RunningRollout,
    Truncated,
    check_length,
    check_sampling,
    is_truncated,
    routes_so_far,
    sampling_params,
)
from treering.integrations.vllm.plugin import packed, unpacked
from treering.types import TokenIds

_NO_LIMIT = 1 << 62


class VLLMEngine(Engine):
    """Engine that samples rollouts of a model with a vLLM `LLM` of the same shape.

    Example:
        >>> llm = vllm.LLM(folder, logprobs_mode="processed_logprobs", async_scheduling=False)     # doctest: +SKIP
        >>> engine = VLLMEngine(llm, model)                                                        # doctest: +SKIP
        >>> request = Request(prompt_id="q", prompt=prompt, sampling=Sampling(max_tokens=64))      # doctest: +SKIP
        >>> for rollout in engine.generate([request]):                                             # doctest: +SKIP
        ...     print(rollout.tokens, rollout.logprobs.sum())
    """

    def __init__(
        self,
        llm: Any,
        model: nn.Module,
        *,
        version: int = 0,
        seed: int = 0,
        max_batch: int | None = None,
        decode: Decode | None = None,
        truncated: Truncated = "refuse",
        verification: Verification = "rejection",
        drafter: Drafter | None = None,
    ) -> None:
        """Load the model's current weights into the LLM, which only this engine may use from then on.

        Args:
            llm: a `vllm.LLM`, in this process or its own.
            model: a Hugging Face causal language model, or a PEFT model of one with LoRA, which is merged in the LLM;
                the model itself is only read. With `enable_return_routed_experts` of the LLM, rollouts have their
                `routed_experts`.
            version: policy version of the current weights.
            seed: of the noise.
            max_batch: rollouts that run at a time; None: the LLM's max_num_seqs.
            decode: tokens to text, for stop strings.
            truncated: "refuse" or "recompute" sampling that vLLM gives no `policy_logprobs` for.
            verification: "rejection" or "exact" verification of drafts.
            drafter: exchanges its calibration with the drafter inside vLLM; None keeps none.

        Raises:
            ConfigError: a setting of the engine or the LLM that would change log-probs; the message has the fix.
            InputError: the LLM is of another model.
            StateError: the LLM runs other requests.
            UnsupportedError: a setting or a model that the engine does not support.
        """
        check_llm(llm, model)
        config = llm.llm_engine.vllm_config
        check_engine_settings(config, max_batch=max_batch, truncated=truncated, version=version, seed=seed)
        self._llm, self._engine, self._model = llm, llm.llm_engine, model
        self._seed, self._decode, self._truncated = seed, decode, truncated
        self._max_batch = max_batch or config.scheduler_config.max_num_seqs
        self._max_model_len = config.model_config.max_model_len
        self._has_drafts = config.speculative_config is not None
        self._has_proposer = has_proposer(config)
        self._layers = routed_layers(config, model)
        self._admission = Admission(
            vocab_size=config.model_config.get_vocab_size(),
            max_context=_NO_LIMIT,
            num_slots=_NO_LIMIT,
            has_decode=decode is not None,
        )
        self._waiting: deque[Request] = deque()
        self._running: dict[str, RunningRollout] = {}
        self._undelivered: list[Rollout] = []
        self._num_submitted = 0
        self._counts = Counts()
        self._waiting_rehearsals: deque[Request] = deque()
        self._rehearsing: dict[str, RunningRollout] = {}
        self._rehearsed: dict[RolloutKey, TokenIds] = {}
        self._rehearses = verification == "exact" and self._has_proposer
        set_verification(llm, verification)
        self._drafter = drafter
        if self._has_proposer:
            llm.collective_rpc("treering_refresh")
            if drafter is not None:
                llm.collective_rpc("treering_load_state", args=(packed(drafter.state()),))
        self._version = version
        self._load_weights()

    @property
    def version(self) -> int:
        """Policy version of the LLM's weights."""
        return self._version

    @property
    def keeps(self) -> Keeps:
        """Guarantee only the distribution: with vLLM's rejection sampling, tokens depend on the drafts.

        With verification="exact" tokens do not depend on drafts, batch and order, up to near-ties of rounding, but a
        rollout that an abort or an update interrupts continues with different noise.
        """
        return "distribution"

    @property
    def stats(self) -> EngineStats:
        """Counts; drafts need `per_request_spec_decode_metrics`, and count when their rollout ends."""
        return self._counts.stats

    @property
    def num_unfinished(self) -> int:
        """Number of requests that wait, run or are not yet delivered."""
        return len(self._waiting) + len(self._running) + len(self._undelivered)

    def progress(self) -> dict[RolloutKey, int]:
        """Return the tokens so far of each running rollout."""
        return {running.request.key: running.num_tokens for running in self._running.values()}

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests; stop strings need `decode`.

        Raises:
            ConfigError: sampling parameters that vLLM would not apply exactly; then no request is queued.
        """
        requests = as_requests(requests)
        self._check(requests, self._keys)
        self._withdraw({request.key for request in requests})
        self._waiting += requests

    def step(self) -> list[Rollout]:
        """Run one pass and return the finished rollouts."""
        finished, self._undelivered = self._undelivered, []
        while self._waiting and len(self._running) < self._max_batch:
            if len(self._running) + len(self._rehearsing) == self._max_batch:
                self._withdraw({list(self._rehearsing.values())[-1].request.key})
            request = self._waiting.popleft()
            vllm_id, running = self._start(request, request.unstarted())
            self._running[vllm_id] = running
        while self._waiting_rehearsals and len(self._running) + len(self._rehearsing) < self._max_batch:
            request = self._waiting_rehearsals.popleft()
            vllm_id, running = self._start(request, request.unstarted())
            self._rehearsing[vllm_id] = running
        return finished + self._advance() if self._running or self._rehearsing else finished

    @property
    def row_price(self) -> float:
        """Cost of a rehearsed token relative to a decoded one; 1.0 without exact verification, and on a CPU."""
        is_cpu = self._engine.vllm_config.device_config.device_type == "cpu"
        return GPU_ROW_PRICE if self._rehearses and not is_cpu else 1.0

    @property
    def is_rehearsing(self) -> bool:
        """Whether `step` has rehearsals to continue."""
        return bool(self._rehearsing or self._waiting_rehearsals)

    def rehearse(self, requests: Iterable[Request]) -> None:
        """Sample later rollouts early in free rows, with their own seeds; drafted again, most tokens stay.

        Raises:
            ConfigError: vLLM does not draw rehearsed tokens again with their own noise: it needs the history's proposer
                and verification="exact". Also as `submit` does.
            InputError: as `submit` does.
        """
        if not self._rehearses:
            raise ConfigError(
                'rehearsals need an LLM that drafts with HistoryProposer, and verification="exact", which draws a '
                "rehearsed token again with its own noise; set both, or rehearse = off"
            )
        requests = as_requests(requests)
        self._check(requests, self._keys | self._rehearsal_keys)
        self._waiting_rehearsals += requests

    def take_rehearsals(self) -> dict[RolloutKey, TokenIds]:
        """End all rehearsals and return their tokens so far."""
        self._withdraw(self._rehearsal_keys)
        taken, self._rehearsed = self._rehearsed, {}
        return taken

    def _check(self, requests: Sequence[Request], keys: set[RolloutKey]) -> None:
        self._admission.check(requests, keys)
        for request in requests:
            check_length(request, self._max_model_len)
            check_sampling(request.sampling, truncated=self._truncated, has_drafts=self._has_drafts)

    @property
    def _rehearsal_keys(self) -> set[RolloutKey]:
        waiting = {request.key for request in self._waiting_rehearsals}
        return waiting | {running.request.key for running in self._rehearsing.values()}

    def _withdraw(self, keys: set[RolloutKey]) -> None:
        """End the rehearsals of these keys, and keep their tokens."""
        ended = [vllm_id for vllm_id, running in self._rehearsing.items() if running.request.key in keys]
        if ended:
            self._engine.abort_request(ended)
        for vllm_id in ended:
            running = self._rehearsing.pop(vllm_id)
            self._rehearsed[running.request.key] = np.array(running.tokens, np.int32)
        self._waiting_rehearsals = deque(one for one in self._waiting_rehearsals if one.key not in keys)

    def peek(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return running rollouts with their tokens so far."""
        return [running.rollout("abort") for running in self._running.values() if running.request.key in set(keys)]

    def abort(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Abort rollouts and return them with their tokens so far."""
        aborted_keys = set(keys)
        aborted = [rollout for rollout in self._undelivered if rollout.key in aborted_keys]
        self._undelivered = [rollout for rollout in self._undelivered if rollout.key not in aborted_keys]
        aborted += [running.rollout("abort") for running in self._interrupt(aborted_keys)]
        for request in [request for request in self._waiting if request.key in aborted_keys]:
            self._waiting.remove(request)
            aborted.append(request.unstarted())
        return aborted

    def update_weights(self, version: int, when_running: WhenRunning = "finish") -> None:
        """Load new weights after finishing, aborting or re-prefilling the running rollouts."""
        check_update(version, self._version, when_running)
        if version == self._version:
            self._check_unchanged()
            return
        if when_running == "finish":
            while self._running:
                self._undelivered += self._advance()
        self._withdraw(self._rehearsal_keys)
        interrupted = self._interrupt({running.request.key for running in self._running.values()})
        self._version = version
        self._load_weights()
        for running in interrupted:
            if when_running == "reprefill":
                vllm_id, continued = self._start(running.request, running.rollout("abort"))
                self._running[vllm_id] = continued
            else:
                self._undelivered.append(running.rollout("abort"))

    def refresh_history(self) -> None:
        """Reload the history, and fetch the calibration of the drafter inside vLLM."""
        if not self._has_proposer:
            return
        self._llm.collective_rpc("treering_refresh")
        if self._drafter is not None:
            (state, *_) = self._llm.collective_rpc("treering_state")
            self._drafter.load_state(unpacked(state))

    @property
    def _keys(self) -> set[RolloutKey]:
        waiting = {request.key for request in self._waiting}
        return waiting | set(self.progress()) | {rollout.key for rollout in self._undelivered}

    def _load_weights(self) -> None:
        """Load the model's weights into vLLM, and empty its caches."""
        self._fingerprint = fingerprint(self._model)
        with checkpoint_of(self._model) as folder:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        if not self._llm.reset_prefix_cache():
            raise StateError("new weights need an empty cache, but vLLM still holds keys and values; create a new LLM")
        self._engine.set_weight_version(str(self._version))

    def _check_unchanged(self) -> None:
        if fingerprint(self._model) != self._fingerprint:
            raise InputError(
                f"the weights have changed since version {self._version}, but a version names one set of weights; call "
                f"update_weights({self._version + 1})"
            )

    def _start(self, request: Request, start: Rollout) -> tuple[str, RunningRollout]:
        """Submit a request to vLLM whose rollout has the tokens of `start`; return its id there, and its record."""
        # A continued rollout draws fresh noise, so its rehearsal would not come true.
        is_whole = self._rehearses and request.rehearsed is not None and start.num_tokens == 0
        params = sampling_params(
            request,
            num_tokens=start.num_tokens,
            vocab_size=self._admission.vocab_size,
            seed=self._seed,
            names_prompt=self._has_proposer,
            rehearsed=request.rehearsed.tolist() if is_whole and request.rehearsed is not None else (),
        )
        prompt = [*request.prompt.tolist(), *start.tokens.tolist()]
        vllm_id = f"treering-{self._num_submitted}"
        self._num_submitted += 1
        self._engine.add_request(vllm_id, {"prompt_token_ids": prompt}, params)
        running = RunningRollout(
            request=request,
            vllm_id=vllm_id,
            version=self._version,
            start=start,
            has_policy_logprobs=not is_truncated(request.sampling),
            layers=self._layers,
        )
        return vllm_id, running

    def _interrupt(self, keys: set[RolloutKey]) -> list[RunningRollout]:
        """Take running rollouts out of vLLM."""
        found = [running for running in self._running.values() if running.request.key in keys]
        if found:
            self._abort(found)
        for running in found:
            del self._running[running.vllm_id]
        return found

    def _abort(self, ended: Sequence[RunningRollout]) -> None:
        """Abort requests of vLLM, and keep their routes."""
        if self._layers is not None:
            for running in ended:
                running.take_routes(routes_so_far(self._engine, running.vllm_id))
        self._engine.abort_request([running.vllm_id for running in ended])

    def _advance(self) -> list[Rollout]:
        """Run one pass and take its results."""
        finished = []
        every = self._engine.step()
        self._note_rehearsals([output for output in every if output.request_id in self._rehearsing])
        outputs = [output for output in every if output.request_id in self._running]
        self._counts.note_pass(outputs)
        for output in outputs:
            running, completion = self._running[output.request_id], output.outputs[0]
            is_first = not running.tokens
            num_new = running.extend(completion)
            has_rehearsal = self._rehearses and running.request.rehearsed is not None
            self._counts.note_row(output, num_new, is_first=is_first, has_rehearsal=has_rehearsal)
            is_stopped = self._decode is not None and running.cut_at_stop(num_new, self._decode)
            if is_stopped and not output.finished:
                self._abort([running])
            if is_stopped or output.finished:
                finished.append(self._finish(running, "stop" if is_stopped else completion.finish_reason))
        return finished

    def _note_rehearsals(self, outputs: Sequence[Any]) -> None:
        """Take the new tokens of rehearsals, and end those that vLLM has finished."""
        for output in outputs:
            running = self._rehearsing[output.request_id]
            self._counts.note_rehearsed(running.extend(output.outputs[0]))
            if output.finished:
                del self._rehearsing[output.request_id]
                self._rehearsed[running.request.key] = np.array(running.tokens, np.int32)

    def _finish(self, running: RunningRollout, reason: FinishReason) -> Rollout:
        del self._running[running.vllm_id]
        rollout = running.rollout(reason)
        if self._rehearses and running.request.rehearsed is not None:
            self._counts.note_kept(running.request.rehearsed, rollout.tokens)
        return rollout
