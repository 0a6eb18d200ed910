"""Drafter of one vLLM worker and its history; created after the worker has started, because it needs numba."""

import time
from collections.abc import Container, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.arrays import Int32Array, Int64Array
from treering.errors import InputError
from treering.history.draft.drafter import Drafter
from treering.history.draft.request_drafter import RequestDrafter, before_unknown
from treering.history.match.sources import GainGate
from treering.history.store.history_reader import BackgroundReader, HistoryReader
from treering.history.store.prompt_index import PromptIndex
from treering.history.store.store import HistoryStore
from treering.integrations.vllm.vllm_settings import PluginSettings, read_request_args
from treering.types import PromptId, hash_of_prompt


class PromptTable:
    """Table of prompts by their tokens; finds the longest prompt that a row begins with.

    Example: with the prompts [5, 6] as "q" and [5, 6, 7, 8] as "r", the row [5, 6, 7, 8, 9] begins with "r" and
    [5, 6, 7, 9] with "q".
    """

    def __init__(self) -> None:
        self._ids: dict[int, dict[str, PromptId]] = {}

    def add(self, tokens: Int32Array, prompt_id: PromptId) -> None:
        """Add a prompt, int32 [P] with P >= 1, or change its id."""
        self._ids.setdefault(tokens.size, {})[hash_of_prompt(tokens)] = prompt_id

    def find(self, tokens: Int32Array, history: Container[PromptId]) -> tuple[PromptId, int]:
        """Return the prompt that a context int32 [L], L >= 1, begins with, and its number of tokens.

        A whole context that history knows by its hash comes first, then the table's longest prompt. A context that
        begins with neither is a prompt itself, and joins the table under its hash.
        """
        whole = hash_of_prompt(tokens)
        found = (whole, int(tokens.size)) if whole in history else self._longest(tokens)
        if found is None:
            found = whole, int(tokens.size)
        if found[1] == tokens.size:
            self._ids.setdefault(tokens.size, {})[whole] = found[0]
        return found

    def _longest(self, tokens: Int32Array) -> tuple[PromptId, int] | None:
        """Return the table's longest prompt that the tokens begin with; hashes each token once."""
        found, done = None, 0
        hashed = blake2b(digest_size=8)
        for size in sorted(size for size in self._ids if size <= tokens.size):
            hashed.update(np.ascontiguousarray(tokens[done:size], np.int32).tobytes())
            done = size
            prompt_id = self._ids[size].get(hashed.hexdigest())
            if prompt_id is not None:
                found = prompt_id, size
        return found


_NUM_NEWEST, _NUM_SPREAD = 32, 64

_Print = tuple[int, bytes, bytes]


class ContentRows:
    """Names of rows that follow them from step to step, wherever the batch puts them.

    A row continues an earlier one if it has its tokens: the same count, the same newest tokens, and the same tokens at
    equal distances. Rows with the same tokens are interchangeable.
    """

    def __init__(self, requests: RequestDrafter, prompts: PromptTable) -> None:
        """Add rows to `requests`, and remove them when they leave."""
        self._requests, self._prompts = requests, prompts
        self._names: list[str] = []
        self._prints: list[_Print] = []
        self._num_named = 0

    def names(
        self,
        sampled: Sequence[Sequence[int]],
        tokens: Int32Array,
        num_tokens: NDArray[np.integer[Any]],
        history: Container[PromptId],
    ) -> list[str]:
        """Return the names of the B rows of a step.

        Args:
            sampled: B lists of the tokens that each row gained, [] while its prompt is being prefilled.
            tokens: int32 [>= B, L], prompt and rollout so far.
            num_tokens: [>= B], tokens of each row, including the sampled ones.
            history: ids of known prompts.
        """
        sizes = num_tokens[: len(sampled)].tolist()
        before = [size - len(new) for size, new in zip(sizes, sampled, strict=True)]
        names = self._continued([_print_of(tokens[b], size) for b, size in enumerate(before)])
        self._requests.remove(set(self._names).difference(names))
        found = [name or self._add(tokens[b, : before[b]], history) for b, name in enumerate(names)]
        self._names, self._prints = found, [_print_of(tokens[b], size) for b, size in enumerate(sizes)]
        return found

    def _continued(self, prints: Sequence[_Print]) -> list[str]:
        """Return each row's name from the previous step, or an empty string."""
        names = [""] * len(prints)
        for b, (old, new) in enumerate(zip(self._prints, prints, strict=False)):
            if old == new:
                names[b] = self._names[b]
        if "" not in names or not self._names:
            return names
        kept, moved = set(names), dict[_Print, list[str]]()
        for name, old in zip(self._names, self._prints, strict=True):
            if name not in kept:
                moved.setdefault(old, []).append(name)
        return [name or (moved[new].pop() if moved.get(new) else "") for name, new in zip(names, prints, strict=True)]

    def _add(self, context: Int32Array, history: Container[PromptId]) -> str:
        """Add a new row and return its name; its context is its prompt, or, if it was preempted, begins with it."""
        name = str(self._num_named)
        self._num_named += 1
        prompt_id, size = self._prompts.find(context, history) if context.size else ("", 0)
        self._requests.add(name, prompt_id=prompt_id, group=prompt_id, num_prompt_tokens=size)
        return name


def _print_of(line: Int32Array, size: int) -> _Print:
    """Return a fingerprint of the first `size` tokens of a line."""
    newest, spread = line[max(0, size - _NUM_NEWEST) : size], line[: size : size // _NUM_SPREAD + 1]
    return size, newest.tobytes(), spread.tobytes()


_NO_END = np.iinfo(np.int64).max


class RunnerRows:
    """Names of rows from the runner's batch; adds new requests and removes those that ended.

    A request with an identity (`request_args`) is known by it, others by their prompt's tokens.

    Attributes:
        ends: int64 [B], number of tokens at which each row of the latest step ends at the latest.
        first_ends: int64 [B], number of tokens from which its stop tokens may end it, by its `min_tokens`.
        rehearsed: by request, the tokens that its prompt is expected to go on with, and how many are before them.
    """

    def __init__(self, requests: RequestDrafter, prompts: PromptTable) -> None:
        """Add requests to `requests`."""
        self._requests, self._prompts = requests, prompts
        self._names: list[str] = []
        self.ends: Int64Array = np.zeros(0, np.int64)
        self.first_ends: Int64Array = np.zeros(0, np.int64)
        self.rehearsed: dict[str, tuple[int, Int32Array]] = {}

    def names(self, runner: Any, scheduler_output: Any, history: Container[PromptId]) -> list[str]:
        """Return the names of the B rows of a step.

        Args:
            runner: vLLM's `GPUModelRunner`.
            scheduler_output: of the step.
            history: ids of known prompts.
        """
        batch = runner.input_batch
        names: list[str] = batch.req_ids
        self._requests.remove(scheduler_output.finished_req_ids)
        for name in scheduler_output.finished_req_ids:
            self.rehearsed.pop(name, None)
        if names != self._names:
            for line, name in enumerate(names):
                if name not in self._requests:
                    self._add(name, batch.token_ids_cpu[line, : batch.num_prompt_tokens[line]], runner, history)
            requests = [runner.requests[name] for name in names]
            self.ends = np.array([_end_of(request) for request in requests], np.int64)
            self.first_ends = np.array([_first_end_of(request) for request in requests], np.int64)
            self._names = list(names)
        return names

    def _add(self, name: str, prompt: Any, runner: Any, history: Container[PromptId]) -> None:
        params = runner.requests[name].sampling_params
        identity = None if params is None else read_request_args(params.extra_args)
        if identity is not None and identity.rehearsed:
            self.rehearsed[name] = prompt.size, np.array(identity.rehearsed, np.int32)
        if identity is None or identity.prompt_id is None:
            prompt_id, size = self._prompts.find(prompt, history) if prompt.size else ("", 0)
            self._requests.add(name, prompt_id=prompt_id, group=prompt_id, num_prompt_tokens=size)
            return
        known = identity.num_prompt_tokens
        size = prompt.size if known is None else min(known, prompt.size)
        if size:
            self._prompts.add(prompt[:size], identity.prompt_id)
        group = identity.prompt_id, identity.draw
        self._requests.add(name, prompt_id=identity.prompt_id, group=group, num_prompt_tokens=size)


def _end_of(request: Any) -> int:
    """Return the number of tokens at which a request ends by its `max_tokens`."""
    most = None if request.sampling_params is None else request.sampling_params.max_tokens
    return _NO_END if most is None else int(request.num_prompt_tokens + most)


def _first_end_of(request: Any) -> int:
    """Return the number of tokens from which a request may stop by its `min_tokens`."""
    least = None if request.sampling_params is None else request.sampling_params.min_tokens
    return int(request.num_prompt_tokens + least) if least else 0


class DraftSession:
    """Drafter for a worker's steps.

    Attributes:
        requests: drafter by request.
        folder: absolute path of the store; None without one.
        history: reader of the store's folder; None without one.
        num_steps: steps that asked for drafts, including those that skipped the search.
        num_rows: total of their rows.
        propose_s: seconds that they took.

    Example: `DraftSession(read_settings(), max_draft=16, max_model_len=4096, vocab_size=151936)`.
    """

    def __init__(self, settings: PluginSettings, *, max_draft: int, max_model_len: int, vocab_size: int) -> None:
        """Open the history and compile the drafter.

        Args:
            settings: of the plugin.
            max_draft: most tokens of a draft.
            max_model_len: most tokens of a context.
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
        """Number of prompts with history."""
        return len(self._source.snapshot)

    def propose(
        self,
        sampled: Sequence[Sequence[int]],
        num_tokens: NDArray[np.integer[Any]],
        tokens: Int32Array,
        step: tuple[Any, Any] | None,
    ) -> list[list[int]]:
        """Return drafts for each row of a step.

        Args:
            sampled: B lists of the tokens that each row gained.
            num_tokens: [>= B], tokens of each context, including the sampled ones.
            tokens: int32 [>= B, L], the contexts.
            step: the runner and its scheduler output; None if only the documented contract is known.
        """
        began = time.perf_counter()
        history = self._source.snapshot
        if step is None:
            names, ends = self._by_content.names(sampled, tokens, num_tokens, history), None
        else:
            names, ends = self._by_runner.names(*step, history), self._next_ends(num_tokens)
        lists: list[list[int]] = [[] for _ in names]
        limits = self._limits(sampled, num_tokens, ends)
        rehearsed = self._rehearsed_rest(names, tokens, num_tokens, limits) if step is not None else {}
        if self._gate.is_due(history):
            limits[list(rehearsed)] = 0
            lists = self.requests.propose(names, tokens, num_tokens, limits)
            self._gate.note(len(names), self.requests.num_accepted)
        for line, rest in rehearsed.items():
            lists[line] = rest
        self.num_steps += 1
        self.num_rows += len(names)
        self.propose_s += time.perf_counter() - began
        return lists

    def _rehearsed_rest(
        self, names: Sequence[str], tokens: Int32Array, num_tokens: NDArray[np.integer[Any]], limits: Int64Array
    ) -> dict[int, list[int]]:
        """Return the next rehearsed tokens of each row that has kept all so far, by line."""
        found, rehearsed = dict[int, list[int]](), self._by_runner.rehearsed
        for line, name in enumerate(names if rehearsed else ()):
            if name not in rehearsed or limits[line] == 0:
                continue
            begin, expected = rehearsed[name]
            so_far = tokens[line, begin : num_tokens[line]]
            if so_far.size >= expected.size or not np.array_equal(so_far, expected[: so_far.size]):
                del rehearsed[name]
                continue
            rest = expected[so_far.size : so_far.size + limits[line]].tolist()
            found[line] = before_unknown(rest, self.requests.vocab_size)
        return found

    def reset(self) -> None:
        """Forget all rows after an error; keep calibration and counts."""
        before = self.requests
        before.drafter.load_state(before.drafter.state())
        self.requests = RequestDrafter(before.drafter, vocab_size=before.vocab_size)
        self.requests.num_drafted, self.requests.num_accepted = before.num_drafted, before.num_accepted
        self._forget_rows()

    def close(self) -> None:
        """End the thread that reads the history."""
        if self.history is not None:
            self.history.close()

    def _forget_rows(self) -> None:
        self._by_content = ContentRows(self.requests, self.prompts)
        self._by_runner = RunnerRows(self.requests, self.prompts)

    def _next_ends(self, num_tokens: NDArray[np.integer[Any]]) -> Int64Array:
        """Return the length that each row's drafts may reach: its end, or where `min_tokens` first lets it stop.

        vLLM masks the stop tokens of the token after a draft by the row's length before the draft, so a draft that
        passed `min_tokens` would keep the row from stopping there.
        """
        first, ends = self._by_runner.first_ends, self._by_runner.ends
        return np.where(num_tokens[: first.size] < first, np.minimum(first, ends), ends)

    def _limits(
        self, sampled: Sequence[Sequence[int]], num_tokens: NDArray[np.integer[Any]], ends: Int64Array | None
    ) -> Int64Array:
        """Return the most tokens to draft for each row: what fits before its end, 0 while its prompt is prefilled.

        A step computes the row's newest token and its drafts, and gains one token more than it accepts.
        """
        counts = np.asarray(num_tokens[: len(sampled)], np.int64)
        left = self._max_model_len - counts if ends is None else np.minimum(self._max_model_len, ends) - counts
        limits: Int64Array = np.clip(left - 1, 0, self._max_draft)
        limits[[b for b, new in enumerate(sampled) if not new]] = 0
        return limits


class DraftGate:
    """Gate that lets every step search for drafts while they gain enough, else one step in 16.

    A step with drafts costs vLLM more than one without, even if only few rows have one. New history opens the gate.

    Example: with a `min_gain` of 1/16, 64 rows must gain 4 tokens per search. If they gain none, 8 steps search at
    first, then 15 do not, one does, and so on.
    """

    def __init__(self, min_gain: float) -> None:
        """Require `min_gain` accepted tokens per row and search; 0 lets every step search."""
        self._min_gain = min_gain
        self._history: Mapping[PromptId, PromptIndex] | None = None
        self._num_rows = self._num_accepted = 0

    def is_due(self, history: Mapping[PromptId, PromptIndex]) -> bool:
        """Count a step; return whether it searches in this history."""
        if history is not self._history:
            # Row prices are in tokens too.
            self._history, self._gate = history, GainGate(np.zeros(3), self._min_gain)
        return self._gate.is_due()

    def note(self, num_rows: int, num_accepted: int) -> None:
        """Record the rows of a search, and the total tokens accepted before it."""
        self._gate.note(self._num_rows, num_accepted - self._num_accepted, 1.0)
        self._num_rows, self._num_accepted = num_rows, num_accepted


def record(
    store: HistoryStore, outputs: Iterable[Any], version: int, *, prompt_ids: Sequence[PromptId] | None = None
) -> None:
    """Add the tokens of vLLM's outputs to a history, for its next `publish`.

    Args:
        store: store in the folder that `TREERING_HISTORY` names.
        outputs: vLLM's `RequestOutput` records, as `LLM.generate` returns them.
        version: policy version that sampled them, >= 0.
        prompt_ids: id of each output, as in its `request_args`; None: hashes of the prompts' tokens, by which the
            drafter finds requests without `request_args`.

    Raises:
        InputError: the numbers of ids and outputs differ, or an output has neither an id nor its prompt's tokens.

    Example: `record(store, llm.generate(prompts, sampling), version=3)`, then `store.publish()`.
    """
    found = list(outputs)
    if prompt_ids is not None and len(prompt_ids) != len(found):
        raise InputError(f"each output needs a prompt_id, got {len(prompt_ids)} for {len(found)} outputs")
    for number, output in enumerate(found):
        if prompt_ids is None and not output.prompt_token_ids:
            raise InputError("a prompt of embeddings has no token ids to hash; pass prompt_ids")
        prompt_id = hash_of_prompt(output.prompt_token_ids) if prompt_ids is None else prompt_ids[number]
        rollouts = [np.asarray(completion.token_ids, np.int32) for completion in output.outputs]
        store.add(prompt_id, rollouts, version)
