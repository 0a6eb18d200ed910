"""Around each batch that a trainer samples with its vLLM: history before, a record and metrics after."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object  # type: ignore[import-untyped]

from treering.history.store.snapshot import newest_first
from treering.history.store.store import HistoryStore
from treering.integrations.trl.overrides import Overrides
from treering.integrations.trl.turns import NamedRollout, Turns
from treering.integrations.trl.vllm_hosts import VLLMHost
from treering.metrics import ACCEPTANCE, TOKENS_PER_FORWARD


class VLLMBatches:
    """Records what a trainer's vLLM samples.

    Processes of a run call their vLLM as often as their tools ask, each by itself, and end a batch together: there the
    main process takes the rollouts of all.
    """

    def __init__(self, trainer: Any, generation: Any, host: VLLMHost, folder: Path) -> None:
        """Stands around each batch from now on.

        Args:
            trainer: of TRL, which logs the metrics.
            generation: its `VLLMGeneration`.
            host: its vLLM, as this process sees it.
            folder: of the history.

        Raises:
            StateError: another process writes the history.
        """
        self._trainer, self._host = trainer, host
        self._turns, self._num_tokens = Turns(), 0
        self._store = HistoryStore(folder) if trainer.accelerator.is_main_process else None
        self._version = 0 if self._store is None else _next_version(self._store)
        Overrides(generation).replace("generate", self._generate)
        Overrides(trainer).replace("_generate_and_score_completions", self._sample)

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
    """Above those of the rollouts that are there: a resumed run's are newer."""
    newest = newest_first(store.snapshot)[:1]
    return 1 + max((int(store.snapshot[prompt_id].versions[0]) for prompt_id in newest), default=-1)
