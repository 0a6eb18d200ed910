"""The drafter of one vLLM worker with its history: made after the worker has started, as it needs numba."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.arrays import Int32Array, Int64Array
from treering.history.draft.drafter import Drafter
from treering.history.draft.request_drafter import RequestDrafter
from treering.history.match.sources import GainGate
from treering.history.store.prompt_index import PromptIndex
from treering.history.store.reader import BackgroundReader, HistoryReader
from treering.history.store.store import HistoryStore
from treering.integrations.vllm.content_rows import ContentRows
from treering.integrations.vllm.prompt_table import PromptTable
from treering.integrations.vllm.runner_rows import RunnerRows
from treering.integrations.vllm.settings import PluginSettings
from treering.types import PromptId


class DraftSession:
    """Drafts for a worker's steps.

    Attributes:
        requests: the drafter by request.
        folder: of the store, absolute; None without one.
        history: the store's folder as it is read; None without one.
        num_steps: steps that were asked for drafts, those that did not look for any included.
        num_rows: their rows, summed up.
        propose_s: seconds that they took.

    Example: `DraftSession(read_settings(), max_draft=16, max_model_len=4096, vocab_size=151936)`.
    """

    def __init__(self, settings: PluginSettings, *, max_draft: int, max_model_len: int, vocab_size: int) -> None:
        """Opens the history and compiles the drafter.

        Args:
            settings: of the plugin.
            max_draft: tokens of a draft, at most.
            max_model_len: tokens of a context, at most.
            vocab_size: of the model.

        Raises:
            ConfigError: a setting out of range.
            StateError: the history is a file.
        """
        self.folder = None if settings.history is None else settings.history.resolve()
        self.history = None if settings.history is None else BackgroundReader(HistoryReader(settings.history))
        source = self.history or HistoryStore()
        drafter = Drafter(source, max_draft=max_draft, shape="chain", **settings.drafter_options())
        self.requests = RequestDrafter(drafter, vocab_size=vocab_size)
        self.requests.warm_up()
        self.num_steps = self.num_rows = 0
        self.propose_s = 0.0
        self.prompts = PromptTable()
        self._source = source
        self._gate = DraftGate(settings.min_gain)
        self._max_draft, self._max_model_len = max_draft, max_model_len
        self._forget_rows()
        if self.history is not None and settings.refresh_interval_s > 0:
            self.history.start(settings.refresh_interval_s)

    @property
    def num_prompts(self) -> int:
        """Prompts with history."""
        return len(self._source.snapshot)

    def propose(
        self,
        sampled: Sequence[Sequence[int]],
        num_tokens: NDArray[np.integer[Any]],
        tokens: Int32Array,
        step: tuple[Any, Any] | None,
    ) -> list[list[int]]:
        """Drafts for each row of a step.

        Args:
            sampled: B lists of the tokens that each row gained.
            num_tokens: [>= B], of each context, the sampled ones included.
            tokens: int32 [>= B, L], the contexts.
            step: the runner and its scheduler output; None where only the contract is known.
        """
        began = time.perf_counter()
        history = self._source.snapshot
        if step is None:
            names, ends = self._by_content.names(sampled, tokens, num_tokens, history), None
        else:
            names, ends = self._by_runner.names(*step, history), self._next_ends(num_tokens)
        lists: list[list[int]] = [[] for _ in names]
        if self._gate.is_due(history):
            lists = self.requests.propose(names, tokens, num_tokens, self._limits(sampled, num_tokens, ends))
            self._gate.note(len(names), self.requests.num_accepted)
        self.num_steps += 1
        self.num_rows += len(names)
        self.propose_s += time.perf_counter() - began
        return lists

    def start_anew(self) -> None:
        """Forgets all rows, as after an error; what was learnt and counted stays."""
        before = self.requests
        before.drafter.load_state(before.drafter.state())
        self.requests = RequestDrafter(before.drafter, vocab_size=before.vocab_size)
        self.requests.num_drafted, self.requests.num_accepted = before.num_drafted, before.num_accepted
        self._forget_rows()

    def close(self) -> None:
        """Ends the thread that reads the history."""
        if self.history is not None:
            self.history.close()

    def _forget_rows(self) -> None:
        self._by_content = ContentRows(self.requests, self.prompts)
        self._by_runner = RunnerRows(self.requests, self.prompts)

    def _next_ends(self, num_tokens: NDArray[np.integer[Any]]) -> Int64Array:
        """Tokens up to which each row's drafts may go: where it ends, or where its `min_tokens` first let it stop.

        vLLM masks stop tokens of the token after a draft by the row's length before the draft, so a draft that passed
        `min_tokens` would keep the row from stopping there.
        """
        first, ends = self._by_runner.first_ends, self._by_runner.ends
        return np.where(num_tokens[: first.size] < first, np.minimum(first, ends), ends)

    def _limits(
        self, sampled: Sequence[Sequence[int]], num_tokens: NDArray[np.integer[Any]], ends: Int64Array | None
    ) -> Int64Array:
        """Tokens to draft for each row at most: what fits before its end, none while its prompt is being prefilled.

        A step computes the row's newest token and its drafts, and gains one token more than it accepts.
        """
        counts = np.asarray(num_tokens[: len(sampled)], np.int64)
        left = self._max_model_len - counts if ends is None else np.minimum(self._max_model_len, ends) - counts
        limits: Int64Array = np.clip(left - 1, 0, self._max_draft)
        limits[[b for b, new in enumerate(sampled) if not new]] = 0
        return limits


class DraftGate:
    """Lets every step look for drafts while they gain enough, and else one in 16 until they do or history is news.

    A step with drafts costs vLLM more than one without, however few rows have one.

    Example: with a `min_gain` of 1/16, 64 rows must gain 4 tokens a look. If they gain none, 8 steps look at first,
    then 15 do not, one does, and so on.
    """

    def __init__(self, min_gain: float) -> None:
        """Demands so many accepted tokens a row and look; 0 lets every step look."""
        self._min_gain = min_gain
        self._history: Mapping[PromptId, PromptIndex] | None = None
        self._num_rows = self._num_accepted = 0

    def is_due(self, history: Mapping[PromptId, PromptIndex]) -> bool:
        """Whether this step looks, in this history; counts the step."""
        if history is not self._history:
            # The price of a row is in tokens, too.
            self._history, self._gate = history, GainGate(np.zeros(3), self._min_gain)
        return self._gate.is_due()

    def note(self, num_rows: int, num_accepted: int) -> None:
        """Takes the rows of a look, and all tokens that looks before it have gained."""
        self._gate.note(self._num_rows, num_accepted - self._num_accepted, 1.0)
        self._num_rows, self._num_accepted = num_rows, num_accepted
