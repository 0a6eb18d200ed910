"""Requests as vLLM's model runner names them: what its documented contract leaves out."""

from collections.abc import Container
from typing import Any

import numpy as np

from treering.arrays import Int64Array
from treering.history.draft.request_drafter import RequestDrafter
from treering.integrations.vllm.prompt_table import PromptTable
from treering.integrations.vllm.request_args import read_request_args
from treering.types import PromptId

_NO_END = np.iinfo(np.int64).max


class RunnerRows:
    """Takes the names of rows from the runner's batch, adds new requests and removes those that ended.

    A request that says what it continues (`request_args`) is known by that, others by their prompt's tokens.

    Attributes:
        ends: int64 [B], the number of tokens at which each row of the latest step ends at the latest.
        first_ends: int64 [B], the number at which its stop tokens may end it at the earliest, by its `min_tokens`.
    """

    def __init__(self, requests: RequestDrafter, prompts: PromptTable) -> None:
        """Adds requests to `requests`."""
        self._requests, self._prompts = requests, prompts
        self._names: list[str] = []
        self.ends: Int64Array = np.zeros(0, np.int64)
        self.first_ends: Int64Array = np.zeros(0, np.int64)

    def names(self, runner: Any, scheduler_output: Any, history: Container[PromptId]) -> list[str]:
        """Names of the B rows of a step.

        Args:
            runner: vLLM's `GPUModelRunner`.
            scheduler_output: of the step.
            history: ids of prompts that are known.
        """
        batch = runner.input_batch
        names: list[str] = batch.req_ids
        self._requests.remove(scheduler_output.finished_req_ids)
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
        if identity is None:
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
    """Tokens at which a request ends by its `max_tokens`."""
    most = None if request.sampling_params is None else request.sampling_params.max_tokens
    return _NO_END if most is None else int(request.num_prompt_tokens + most)


def _first_end_of(request: Any) -> int:
    """Tokens from which on a request may stop by its `min_tokens`."""
    least = None if request.sampling_params is None else request.sampling_params.min_tokens
    return int(request.num_prompt_tokens + least) if least else 0
