"""Code that runs inside vLLM's processes: the drafter's class, the calls of a loop, and the plugin that joins them.

Nothing here may import numba before `load_model`, which runs after the worker has started.
"""

import copy
import io
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from treering.integrations.vllm.vllm_settings import check_config, read_settings

if TYPE_CHECKING:
    from treering.integrations.vllm.draft_session import DraftSession
import inspect
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.util import find_spec

from treering.errors import StateError
from treering.integrations.vllm.exact_sampling import install


def packed(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return named arrays as the bytes of an .npz file."""
    file, named = io.BytesIO(), dict[str, Any](arrays)
    np.savez(file, **named)
    return file.getvalue()


def unpacked(content: bytes) -> dict[str, NDArray[Any]]:
    """Return the arrays of `packed`.

    Raises:
        ValueError: the bytes are not from `packed`.

    Example: `unpacked(packed({"x": np.arange(3)}))["x"]` is [0, 1, 2].
    """
    return dict(np.load(io.BytesIO(content), allow_pickle=False))


class HistoryProposer:
    """Drafter from history for vLLM: a `custom_class` proposer.

    It needs only vLLM's documented contract; then it finds a request's prompt by its tokens, and its rows by their
    content. If `register` has run, it knows requests by their ids and `request_args`.

    An error while drafting warns once and yields no drafts; it never fails a step.

    Args:
        vllm_config: vLLM's `VllmConfig`.

    Raises:
        UnsupportedError: a configuration under which vLLM would not call the drafter.
        ConfigError: a setting is unknown or of a wrong type.

    Example: `LLM(model, speculative_config={"method": "custom_class", "model":
    "treering.integrations.vllm.HistoryProposer", "num_speculative_tokens": 16})`.
    """

    def __init__(self, vllm_config: Any) -> None:
        check_config(vllm_config)
        self._settings = read_settings()
        speculative = vllm_config.speculative_config
        self._max_draft = int(speculative.num_speculative_tokens)
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        self._vocab_size = int(vllm_config.model_config.get_vocab_size())
        speculative.draft_model_config = _widened(speculative.draft_model_config, self._max_draft)
        self._session: DraftSession | None = None
        self._step: tuple[Any, Any] | None = None
        self.num_failures = 0
        """Steps without drafts because of an error."""
        self.has_identity = False
        """Whether the latest step's requests were known by their ids."""

    def load_model(self, target_model: Any = None) -> None:
        """Open the history and compile the drafter before the first step; vLLM calls it after loading weights.

        Raises:
            ConfigError: a setting out of range.
            StateError: `TREERING_HISTORY` is a file.
        """
        from treering.integrations.vllm.draft_session import DraftSession

        self._session = DraftSession(
            self._settings,
            max_draft=self._max_draft,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
        )

    @property
    def session(self) -> "DraftSession":
        """Drafter and its history; created on first use if `load_model` was not called."""
        if self._session is None:
            self.load_model()
        assert self._session is not None
        return self._session

    def begin_step(self, runner: Any, scheduler_output: Any) -> None:
        """Set the runner that asks for the next drafts, and its step."""
        self._step = runner, scheduler_output

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:  # fmt: skip
        """Return drafts for each row, by vLLM's contract.

        Args:
            sampled_token_ids: B lists of the tokens that the step sampled, [] for rows in prefill.
            num_tokens_no_spec: int32 [>= B], tokens of each row.
            token_ids_cpu: int32 [>= B, max_model_len], prompt and output of each row.
            slot_mappings: not read.

        Returns:
            B lists of at most `num_speculative_tokens` token ids.
        """
        step, self._step = self._step, None
        try:
            lists = self.session.propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, step)
        except Exception as error:
            self._note_failure(error)
            return [[] for _ in sampled_token_ids]
        self.has_identity = step is not None
        return lists

    def _note_failure(self, error: Exception) -> None:
        self.num_failures += 1
        if self.num_failures == 1:
            warnings.warn(
                f"drafting failed with {type(error).__name__}: {error}; steps where it fails get no drafts",
                stacklevel=3,
            )
        if self._session is not None:
            self._session.reset()


def _widened(config: Any, max_draft: int) -> Any:
    """Return a copy of the draft model's configuration in which drafts fit after any row.

    vLLM compares its `max_model_len` with the longest row; if drafts do not fit, vLLM skips `propose` and verifies
    zeros for all rows. `DraftSession` cuts drafts to what fits, row by row.
    """
    if config is None:
        return None
    widened = copy.copy(config)
    widened.max_model_len = config.max_model_len + max_draft
    return widened


class WorkerExtension:
    """Methods for vLLM's `worker_extension_cls`; vLLM can send their results between processes.

    Example: `LLM(model, worker_extension_cls="treering.integrations.vllm.WorkerExtension", ...)`, and after a publish
    `llm.collective_rpc("treering_refresh")`.
    """

    model_runner: Any

    def treering_refresh(self) -> bool:
        """Read the newest publish of the history now; return whether there was one.

        Raises:
            StateError: the worker uses another drafter.
        """
        history = self._treering_proposer().session.history
        return False if history is None else history.refresh()

    def treering_state(self) -> bytes:
        """Return the drafter's calibration for a checkpoint: arrays as the bytes of an .npz file.

        Raises:
            StateError: the worker uses another drafter.
        """
        return packed(self._treering_proposer().session.requests.drafter.state())

    def treering_load_state(self, state: bytes) -> None:
        """Continue from a `treering_state`; forget the running rows.

        Raises:
            StateError: the worker uses another drafter.
            InputError: a state of another kind.
        """
        session = self._treering_proposer().session
        session.requests.drafter.load_state(unpacked(state))
        session.requests.forget()

    def treering_stats(self) -> dict[str, Any]:
        """Return counts: steps, rows, seconds of drafting, drafted and accepted tokens, prompts, failed steps.

        "history" is the folder of the history; None without one.

        Raises:
            StateError: the worker uses another drafter.
        """
        proposer = self._treering_proposer()
        session = proposer.session
        return {
            "num_steps": session.num_steps,
            "num_rows": session.num_rows,
            "propose_s": session.propose_s,
            "num_drafted": session.requests.num_drafted,
            "num_accepted": session.requests.num_accepted,
            "num_prompts": session.num_prompts,
            "num_failures": proposer.num_failures,
            "has_identity": proposer.has_identity,
            "history": None if session.folder is None else str(session.folder),
        }

    def treering_verify(self, verification: str) -> str | None:
        """Set how drafts are verified, "rejection" or "exact"; return None, or why it cannot."""
        return install(self.model_runner, verification)

    def _treering_proposer(self) -> HistoryProposer:
        drafter = getattr(self.model_runner, "drafter", None)
        if not isinstance(drafter, HistoryProposer):
            raise StateError(
                f"this worker drafts with {type(drafter).__name__}; set speculative_config's model to "
                "treering.integrations.vllm.HistoryProposer"
            )
        return drafter


_DRAFT = (
    "self",
    "scheduler_output",
    "sampled_token_ids",
    "sampling_metadata",
    "hidden_states",
    "sample_hidden_states",
    "aux_hidden_states",
    "spec_decode_metadata",
    "common_attn_metadata",
    "slot_mappings",
)
_SAMPLE = ("self", "logits", "spec_decode_metadata")


def register() -> None:
    """Adapt vLLM's model runner to `HistoryProposer`, and its start to numba; vLLM calls this in every process.

    The runner then reports which requests its rows are, and samples steps without drafts as if there were no drafter.
    Other drafters are not affected. If a method of the runner has an unknown signature, a warning names the effect: the
    proposer uses only the documented contract, or steps without drafts are verified like steps with drafts.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if find_spec("vllm.triton_utils.dispatcher") is not None:
        hide_llvmlite(import_module("vllm.triton_utils.dispatcher"))
    wrap_runner(GPUModelRunner)


_HIDDEN = "llvmlite.binding.ffi"
"""Module that numba imports. vLLM's CPU worker looks for kernels in every module, and fails on an object of it."""


def hide_llvmlite(dispatcher: Any) -> None:
    """Let vLLM's CPU worker start in a process that has imported numba.

    Example: without it the worker fails with "'_lib_fn_wrapper' object has no attribute 'get'".
    """
    original: Any = getattr(dispatcher, "_rebind_kernels", None)
    if original is None or getattr(original, "is_treering", False):
        return

    @wraps(original)
    def rebind(*args: Any, **kwargs: Any) -> Any:
        hidden = sys.modules.pop(_HIDDEN, None)
        try:
            return original(*args, **kwargs)
        finally:
            if hidden is not None:
                sys.modules[_HIDDEN] = hidden

    rebind.is_treering = True  # type: ignore[attr-defined]
    dispatcher._rebind_kernels = rebind


def wrap_runner(runner_class: Any) -> bool:
    """Wrap methods of a model runner's class; return whether requests are known by their ids.

    Example: a class whose methods' parameters differ from those of vLLM 0.32 is left unchanged, with warnings.
    """
    _wrap(runner_class, "_sample", _SAMPLE, _sampling, "steps without drafts are verified as if they had some")
    return _wrap(runner_class, "propose_draft_token_ids", _DRAFT, _proposing, "requests are told apart by their tokens")


def _wrap(
    runner_class: Any, name: str, parameters: tuple[str, ...], wrapped: Callable[[Any], Any], otherwise: str
) -> bool:
    """Replace a method once if it has these parameters; else warn of the effect, `otherwise`."""
    original: Any = getattr(runner_class, name, None)
    if getattr(original, "is_treering", False):
        return True
    found = () if original is None else tuple(inspect.signature(original).parameters)
    if found != parameters:
        warnings.warn(
            f"{otherwise}, because {runner_class.__name__}.{name} of this vLLM takes {', '.join(found) or 'nothing'} "
            f"instead of {', '.join(parameters)}",
            stacklevel=3,
        )
        return False
    replaced: Any = wraps(original)(wrapped(original))
    replaced.is_treering = True
    setattr(runner_class, name, replaced)
    return True


def _proposing(original: Any) -> Any:
    def propose_draft_token_ids(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = getattr(self, "drafter", None)
        if isinstance(drafter, HistoryProposer):
            drafter.begin_step(self, scheduler_output)
        return original(self, scheduler_output, *args, **kwargs)

    return propose_draft_token_ids


def _sampling(original: Any) -> Any:
    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        metadata = spec_decode_metadata
        is_ours = metadata is not None and isinstance(getattr(self, "drafter", None), HistoryProposer)
        # Without drafts each row samples one token, as without a drafter.
        return original(self, logits, None if is_ours and not any(metadata.num_draft_tokens) else metadata)

    return _sample
