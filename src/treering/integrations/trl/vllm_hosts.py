"""The vLLM that samples for a TRL trainer: in its process, or in a server. Both draft by `HistoryProposer`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from treering.engine.protocol import EngineStats
from treering.errors import ConfigError, UnsupportedError
from treering.integrations.trl.requirements import ROLLOUT_TRAINERS, kind_of
from treering.integrations.vllm.engine.llm_requirements import EXTENSION, set_verification
from treering.integrations.vllm.requirements import PROPOSER, speculative_config
from treering.integrations.vllm.settings import HISTORY_VARIABLE
from treering.runtime.ipc.environment import environment_with


class VLLMHost(Protocol):
    """The drafter of a trainer's vLLM, as this process sees it."""

    def refresh(self) -> None:
        """Lets the drafter read the newest history."""

    def counts(self) -> EngineStats:
        """What it has counted of rows and drafts, and nothing else; another process's counts are 0 here."""


def check_sampling(trainer: Any, generation: Any) -> None:
    """Refuses trainers and settings that drafts do not go with.

    Args:
        trainer: of TRL.
        generation: its `VLLMGeneration`, before vLLM has started.

    Raises:
        UnsupportedError: names what is set, and what works.
    """
    kind = kind_of(trainer)
    if kind not in ROLLOUT_TRAINERS:
        raise UnsupportedError(f"vllm_drafts is for {' and '.join(ROLLOUT_TRAINERS)}, got {kind}; make it outside")
    if generation.mode == "colocate" and generation.tensor_parallel_size > 1:
        raise UnsupportedError(
            "the ranks of a tensor-parallel vLLM would draft each for itself, got vllm_tensor_parallel_size="
            f"{generation.tensor_parallel_size}; set it to 1, or make the trainer outside vllm_drafts"
        )
    if generation.min_p:
        raise UnsupportedError(
            f"vLLM verifies no drafts under min_p, got min_p={generation.min_p}; leave it out, or make the trainer "
            "outside vllm_drafts"
        )


@contextmanager
def colocated_settings(folder: Path, max_draft: int) -> Iterator[dict[str, Any]]:
    """Inside, an `LLM` that is made with these arguments drafts from the history of a folder."""
    with environment_with({HISTORY_VARIABLE: str(folder)}):
        yield {"speculative_config": speculative_config(max_draft), "worker_extension_cls": EXTENSION}


class Colocated:
    """The LLM in the trainer's process."""

    def __init__(self, llm: Any) -> None:
        """Checks how it verifies.

        Raises:
            UnsupportedError: drafts would change what it samples.
        """
        set_verification(llm, "rejection")
        self._llm = llm

    def refresh(self) -> None:
        """See `VLLMHost`."""
        self._llm.collective_rpc("treering_refresh")

    def counts(self) -> EngineStats:
        """See `VLLMHost`."""
        return _counts_of(self._llm.collective_rpc("treering_stats")[0])


class Served:
    """A server, which the main process of a run calls."""

    def __init__(self, client: Any, folder: Path) -> None:
        """Checks that the server drafts from the folder's history.

        Args:
            client: TRL's `VLLMClient`; None in other processes than the main one.
            folder: of the history, absolute.

        Raises:
            ConfigError: it does not draft, or from another history; has the command that works.
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
                f"the vLLM server at {client.base_url} drafts from the history {found}, and this run records to "
                f"{folder}; start it with {HISTORY_VARIABLE}={folder}"
            )
        problem = self._call("treering_verify", "rejection")
        if problem is not None:
            raise UnsupportedError(f"drafts would change what the vLLM server samples: {problem}; start it without")

    def refresh(self) -> None:
        """See `VLLMHost`."""
        if self._client is not None:
            self._call("treering_refresh")

    def counts(self) -> EngineStats:
        """See `VLLMHost`."""
        if self._client is None:
            return EngineStats()
        return _counts_of(self._call("treering_stats"))

    def _call(self, method: str, *args: str) -> Any:
        """What the server's first worker answers."""
        url = f"{self._client.base_url}/collective_rpc"
        answer = self._client.session.post(url, json={"method": method, "args": args})
        answer.raise_for_status()
        return answer.json()["results"][0]


def _counts_of(stats: dict[str, Any]) -> EngineStats:
    return EngineStats(**{name: stats[name] for name in ("num_rows", "num_drafted", "num_accepted")})
