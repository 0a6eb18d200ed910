"""`vllm_drafts`: make the vLLM of a TRL trainer, in its process or on a server, draft from the run's earlier rollouts.

TRL creates its vLLM inside the trainer and has no argument for drafts, so they are set up around that creation. Both
vLLMs draft with `HistoryProposer`. History is reloaded before each batch, and the batch is recorded after it.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import transformers
from accelerate.utils import gather_object
from trl.generation import vllm_generation

from treering.arrays import Int32Array
from treering.engine.protocol import EngineStats
from treering.errors import ConfigError, StateError, UnsupportedError
from treering.extras import require
from treering.history.store.history_reader import newest_first
from treering.history.store.store import HistoryStore
from treering.integrations.trl.trl_trainers import ROLLOUT_TRAINERS, Overrides, kind_of
from treering.integrations.trl.vllm_rehearsals import RehearsedBatches, check_rehearsals
from treering.integrations.vllm.draft_session import PromptTable
from treering.integrations.vllm.llm import EXTENSION, Verification, set_verification
from treering.integrations.vllm.vllm_settings import HISTORY_VARIABLE, PROPOSER, environment_with, speculative_config
from treering.metrics import ACCEPTANCE, TOKENS_PER_FORWARD
from treering.types import PromptId

NamedRollout = tuple[PromptId, Int32Array]
"""Id of a prompt, and a rollout's tokens int32 [R]."""


class JoinedTurns:
    """Turns of a trainer's vLLM, joined to rollouts.

    Prompts have the ids that the drafter inside vLLM uses: hashes of their tokens.

    Example: after `add([[5, 6]], [[7]])` and `add([[5, 6, 7, 8]], [[9]])`, `take()` returns one rollout of the prompt
    5 6, with the tokens 7 8 9.
    """

    def __init__(self) -> None:
        self._prompts = PromptTable()
        self._rollouts: dict[PromptId, list[Int32Array]] = {}

    def add(self, contexts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> None:
        """Add the completion of each context; a context that continues a rollout of the batch is its next turn."""
        for context, completion in zip(contexts, completions, strict=True):
            tokens = np.asarray(context, np.int32)
            prompt_id, size = self._prompts.find(tokens, ())
            rollouts, so_far = self._rollouts.setdefault(prompt_id, []), tokens[size:]
            at = next((at for at, rollout in enumerate(rollouts) if _continues(so_far, rollout)), None)
            if at is not None:
                rollouts.pop(at)
            rollouts.append(np.concatenate([so_far, np.asarray(completion, np.int32)]))

    def take(self) -> list[NamedRollout]:
        """Return the rollouts since the last call."""
        taken = [(prompt_id, rollout) for prompt_id, rollouts in self._rollouts.items() for rollout in rollouts]
        self._rollouts = {}
        return taken


def _continues(so_far: Int32Array, rollout: Int32Array) -> bool:
    return rollout.size < so_far.size and np.array_equal(so_far[: rollout.size], rollout)


class VLLMHost(Protocol):
    """Drafter of a trainer's vLLM, as seen from this process."""

    def refresh(self) -> None:
        """Make the drafter read the newest history."""

    def counts(self) -> EngineStats:
        """Return its counts of rows and drafts only; 0 here for a drafter of another process."""


def check_sampling(trainer: Any, generation: Any) -> None:
    """Refuse trainers and settings that do not work with drafts.

    Args:
        trainer: a TRL trainer.
        generation: its `VLLMGeneration`, before vLLM has started.

    Raises:
        UnsupportedError: names what is set and what works.
    """
    kind = kind_of(trainer)
    if kind not in ROLLOUT_TRAINERS:
        raise UnsupportedError(
            f"vllm_drafts works with {' and '.join(ROLLOUT_TRAINERS)}, got {kind}; create it outside"
        )
    if generation.mode == "colocate" and generation.tensor_parallel_size > 1:
        raise UnsupportedError(
            "ranks of a tensor-parallel vLLM would each draft separately, got vllm_tensor_parallel_size="
            f"{generation.tensor_parallel_size}; set it to 1, or create the trainer outside vllm_drafts"
        )
    if generation.min_p:
        raise UnsupportedError(
            f"vLLM cannot verify drafts under min_p, got min_p={generation.min_p}; remove it, or create the trainer "
            "outside vllm_drafts"
        )


@contextmanager
def colocated_settings(folder: Path, max_draft: int) -> Iterator[dict[str, Any]]:
    """Yield the arguments with which an `LLM` created inside drafts from the history of a folder."""
    with environment_with({HISTORY_VARIABLE: str(folder)}):
        yield {"speculative_config": speculative_config(max_draft), "worker_extension_cls": EXTENSION}


class Colocated:
    """LLM in the trainer's process."""

    def __init__(self, llm: Any) -> None:
        """Check how the LLM verifies drafts.

        Raises:
            UnsupportedError: drafts would change what it samples.
        """
        set_verification(llm, "rejection")
        self._llm = llm

    def refresh(self) -> None:
        """Make the drafter read the newest history."""
        self._llm.collective_rpc("treering_refresh")

    def counts(self) -> EngineStats:
        """Return the drafter's counts."""
        return _counts_of(self._llm.collective_rpc("treering_stats")[0])


class ServerConnection:
    """vLLM server that a run's main process calls."""

    def __init__(self, client: Any, folder: Path, verification: Verification = "rejection") -> None:
        """Check that the server drafts from the folder's history, and set how it verifies drafts.

        Args:
            client: TRL's `VLLMClient`; None except in the main process.
            folder: absolute path of the history.
            verification: of drafts.

        Raises:
            ConfigError: it does not draft, or drafts from another history; gives the command that works.
            UnsupportedError: drafts would change what it samples.
        """
        self._client = client
        if client is None:
            return
        info = client.get_server_info()
        speculative, workers = info["speculative_config"] or {}, info["parallel_config"]["worker_extension_cls"]
        if speculative.get("model") != PROPOSER or workers != EXTENSION:
            flags = f"--worker-extension-cls {EXTENSION} --speculative-config '{json.dumps(speculative_config(16))}'"
            raise ConfigError(
                f"the vLLM server at {client.base_url} does not draft from history; start it with "
                f"{HISTORY_VARIABLE}={folder} in its environment and with {flags}"
            )
        found = self._call("treering_stats")["history"]
        if found != str(folder):
            raise ConfigError(
                f"the vLLM server at {client.base_url} drafts from the history {found}, but this run records to "
                f"{folder}; start it with {HISTORY_VARIABLE}={folder}"
            )
        problem = self._call("treering_verify", verification)
        if problem is not None and verification == "exact":
            raise UnsupportedError(f"the vLLM server cannot keep rehearsed tokens: {problem}; or set rehearse=False")
        if problem is not None:
            raise UnsupportedError(
                f"drafts would change what the vLLM server samples: {problem}; start it without drafts"
            )

    def refresh(self) -> None:
        """Make the drafter read the newest history."""
        if self._client is not None:
            self._call("treering_refresh")

    def counts(self) -> EngineStats:
        """Return the drafter's counts; 0 except in the main process."""
        if self._client is None:
            return EngineStats()
        return _counts_of(self._call("treering_stats"))

    def _call(self, method: str, *args: str) -> Any:
        """Return the answer of the server's first worker."""
        url = f"{self._client.base_url}/collective_rpc"
        answer = self._client.session.post(url, json={"method": method, "args": args})
        answer.raise_for_status()
        return answer.json()["results"][0]


def _counts_of(stats: dict[str, Any]) -> EngineStats:
    return EngineStats(**{name: stats[name] for name in ("num_rows", "num_drafted", "num_accepted")})


class VLLMBatches:
    """Recorder of what a trainer's vLLM samples.

    Each process of a run calls its vLLM as often as its tools need; all end a batch together, and the main process
    then takes everyone's rollouts.
    """

    def __init__(self, trainer: Any, generation: Any, host: VLLMHost, folder: Path) -> None:
        """Wrap each batch from now on.

        Args:
            trainer: TRL trainer that logs the metrics.
            generation: its `VLLMGeneration`.
            host: its vLLM, as seen from this process.
            folder: of the history.

        Raises:
            StateError: another process writes the history.
        """
        self._trainer, self._host = trainer, host
        self._turns, self._num_tokens = JoinedTurns(), 0
        self._store = HistoryStore(folder) if trainer.accelerator.is_main_process else None
        self._version = 0 if self._store is None else _next_version(self._store)
        Overrides(generation).replace("generate", self._generate)
        Overrides(trainer).replace("_generate", self._sample)

    def _generate(self, original: Callable[..., Any], prompts: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        found = original(prompts, *args, **kwargs)
        completions = found[1]
        self._turns.add(prompts, completions)
        self._num_tokens += sum(map(len, completions))
        return found

    def _sample(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._host.refresh()
        before = self._host.counts()
        self._num_tokens = 0
        batch = original(*args, **kwargs)
        counted = self._host.counts().since(before)
        mine = (self._num_tokens, counted.num_rows, counted.num_drafted, counted.num_accepted)
        gathered = gather_object([(mine, self._turns.take())])
        self._log(*map(sum, zip(*(counts for counts, _ in gathered), strict=True)))
        self._record([rollout for _, rollouts in gathered for rollout in rollouts])
        return batch

    def _log(self, num_tokens: int, num_rows: int, num_drafted: int, num_accepted: int) -> None:
        metrics = self._trainer._metrics["train" if self._trainer.model.training else "eval"]
        if num_rows:
            metrics[TOKENS_PER_FORWARD].append(num_tokens / num_rows)
        if num_drafted:
            metrics[ACCEPTANCE].append(num_accepted / num_drafted)

    def _record(self, rollouts: list[NamedRollout]) -> None:
        if self._store is None:
            return
        for prompt_id, tokens in rollouts:
            self._store.add(prompt_id, [tokens], self._version)
        self._store.publish()
        self._version += 1


def _next_version(store: HistoryStore) -> int:
    """Return a version above those of the stored rollouts, so that a resumed run's rollouts are newer."""
    newest = newest_first(store.snapshot)[:1]
    return 1 + max((int(store.snapshot[prompt_id].versions[0]) for prompt_id in newest), default=-1)


@contextmanager
def vllm_drafts(history: Path | str, *, max_draft: int = 16, rehearse: bool = False) -> Iterator[None]:
    """Make the vLLM of a trainer that is created inside draft from its earlier rollouts.

    The distribution of rollouts and their log-probs do not change: vLLM verifies drafts. Each batch is recorded when it
    is sampled, and serves as drafts when its prompts return. The trainer logs `rollout/tokens_per_forward` (tokens per
    row and step, 1.0 without drafts) and `rollout/acceptance` (the share of drafted tokens that was accepted).

    With `vllm_mode="colocate"` the drafter is set up here. With `vllm_mode="server"`, start the server with it, on the
    same history: `docs/trl.md` has the command.

    With `rehearse=True` a server samples the next batch while the trainer trains. Each rollout has its own seed, with
    which the new weights draw its early tokens again, so tokens are those without: `docs/rehearsal.md`.

    Args:
        history: folder of a `HistoryStore`, created if missing; one run at a time may write it. All processes of the
            run, and the server, must see it.
        max_draft: tokens per draft, 1 to 64; a server uses its own setting.
        rehearse: whether the server samples the next batch early.

    Raises:
        StateError: no trainer with `use_vllm=True` was created inside, or another process writes the history.
        UnsupportedError: a trainer or setting that does not work with drafts, a vLLM that samples wrongly with them, or
            a server that cannot draw tokens again.
        ConfigError: a server that does not draft, or drafts from another history, or a setting that does not work with
            rehearsals.

    Example:
        >>> with vllm_drafts("runs/history"):                                                 # doctest: +SKIP
        ...     trainer = GRPOTrainer(model, rewards, GRPOConfig(use_vllm=True), data)
        >>> trainer.train()                                                                   # doctest: +SKIP
    """
    making = _Making(Path(history).resolve(), max_draft, rehearse)
    with (
        _replaced(transformers.Trainer, "__init__", making.note_trainer),
        _replaced(vllm_generation.VLLMGeneration, "_init_vllm", making.start),
    ):
        yield
    if not making.has_started:
        raise StateError(
            "vllm_drafts sets up the vLLM of a trainer that is created inside it, but none was; create the trainer in "
            "its with block, with use_vllm=True"
        )


class _Making:
    """Creation of a trainer and its vLLM, intercepted."""

    def __init__(self, folder: Path, max_draft: int, rehearse: bool) -> None:
        self._folder, self._max_draft, self._rehearse = folder, max_draft, rehearse
        self._trainer: Any = None
        self.has_started = False

    def note_trainer(self, original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Create a trainer's base class, and remember the trainer for the next vLLM."""
        self._trainer = trainer
        original(trainer, *args, **kwargs)

    def start(self, original: Callable[..., None], generation: Any) -> None:
        """Start the trainer's vLLM with drafts."""
        require("vllm_drafts", "vllm")
        check_sampling(self._trainer, generation)
        if self._rehearse:
            check_rehearsals(self._trainer, generation)
        host = self._host(original, generation)
        VLLMBatches(self._trainer, generation, host, self._folder)
        if self._rehearse and self._trainer.accelerator.is_main_process:
            # It wraps the recorder, so that no rehearsal runs while a batch is counted.
            RehearsedBatches(self._trainer, generation)
        self.has_started = True

    def _host(self, original: Callable[..., None], generation: Any) -> VLLMHost:
        if generation.mode == "server":
            original(generation)
            client = getattr(generation, "vllm_client", None)
            return ServerConnection(client, self._folder, "exact" if self._rehearse else "rejection")
        with (
            colocated_settings(self._folder, self._max_draft) as ours,
            _replaced(vllm_generation, "LLM", lambda make, **theirs: make(**theirs, **ours)),
        ):
            original(generation)
        return Colocated(generation.llm)


@contextmanager
def _replaced(owner: Any, name: str, run: Callable[..., Any]) -> Iterator[None]:
    overrides = Overrides(owner)
    overrides.replace(name, run)
    try:
        yield
    finally:
        overrides.undo()
