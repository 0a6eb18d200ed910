"""The class that vLLM's `speculative_config` names. It imports numba in `load_model`, after the worker has started."""

import copy
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from treering.integrations.vllm.requirements import check_config
from treering.integrations.vllm.settings import read_settings

if TYPE_CHECKING:
    from treering.integrations.vllm.session import DraftSession


class HistoryProposer:
    """Drafts from history for vLLM: a `custom_class` proposer.

    Works by vLLM's documented contract alone. Then a request's prompt is found by its tokens, and its rows by what they
    hold. Where `register` has run, requests are known by their ids and `request_args`.

    A failing drafter drafts nothing and warns once; it never fails a step.

    Args:
        vllm_config: vLLM's `VllmConfig`.

    Raises:
        UnsupportedError: see `requirements.check_config`.
        ConfigError: a setting is unknown or of a wrong kind.

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
        """Steps that got no drafts because of an error."""
        self.has_identity = False
        """Whether the latest step's requests were known by their ids."""

    def load_model(self, target_model: Any = None) -> None:
        """Opens the history and compiles the drafter, so that no step waits for it; vLLM calls it after the weights.

        Raises:
            ConfigError: a setting out of range.
            StateError: `TREERING_HISTORY` is a file.
        """
        from treering.integrations.vllm.session import DraftSession

        self._session = DraftSession(
            self._settings,
            max_draft=self._max_draft,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
        )

    @property
    def session(self) -> "DraftSession":
        """The drafter and its history; made on first use if `load_model` was not called."""
        if self._session is None:
            self.load_model()
        assert self._session is not None
        return self._session

    def begin_step(self, runner: Any, scheduler_output: Any) -> None:
        """Tells which runner asks for the next drafts, and for which step."""
        self._step = runner, scheduler_output

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:  # fmt: skip
        """Drafts for each row; vLLM's contract.

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
                f"drafting failed, and steps in which it does get no drafts: {type(error).__name__}: {error}",
                stacklevel=3,
            )
        if self._session is not None:
            self._session.start_anew()


def _widened(config: Any, max_draft: int) -> Any:
    """A copy of the draft model's configuration in which drafts fit after any row.

    By `max_model_len` of this configuration vLLM judges whether drafts fit after its longest row. If not, it skips
    `propose` and verifies zeros for all rows. `DraftSession` cuts drafts to what fits, row by row.
    """
    if config is None:
        return None
    widened = copy.copy(config)
    widened.max_model_len = config.max_model_len + max_draft
    return widened
