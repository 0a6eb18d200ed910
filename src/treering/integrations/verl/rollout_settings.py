"""Drafts from history in verl's vLLM rollouts: verl's settings for them, and a batch of verl into a history.

verl 0.9.1 pins vLLM 0.24, which was not run here: this file keeps to what verl's source says.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from treering.errors import ConfigError, InputError
from treering.history.store.store import HistoryStore
from treering.integrations.vllm.requirements import MAX_DRAFT, PROPOSER, speculative_config
from treering.types import PromptId, hash_of_prompt


def with_history_drafts(engine_kwargs: Mapping[str, Any] | None = None, *, max_draft: int = 16) -> dict[str, Any]:
    """Verl's `rollout.engine_kwargs` with drafts from history for vLLM; everything else stays.

    Workers find the history in `TREERING_HISTORY` and need `VLLM_USE_V2_MODEL_RUNNER=0`.

    Args:
        engine_kwargs: by engine; what vLLM gets is under "vllm".
        max_draft: most tokens of a draft, 1 to 64.

    Raises:
        ConfigError: another speculative decoding is set, asynchronous scheduling is, or a draft is too long.

    Example: `with_history_drafts()` is {"vllm": {"speculative_config": {"method": "custom_class", "model":
    "treering.integrations.vllm.HistoryProposer", "num_speculative_tokens": 16}, "async_scheduling": False}}.
    """
    if not 1 <= max_draft <= MAX_DRAFT:
        raise ConfigError(f"a draft has 1 to {MAX_DRAFT} tokens, got max_draft={max_draft}; 16 is usual")
    given = dict(engine_kwargs or {})
    own = dict(given.get("vllm") or {})
    before = own.get("speculative_config")
    if before is not None and dict(before).get("model") != PROPOSER:
        raise ConfigError(
            f"vLLM has one source of drafts, and engine_kwargs.vllm.speculative_config is {before!r}: leave it out"
        )
    if own.get("async_scheduling"):
        raise ConfigError(
            "drafts from history are made between steps, and engine_kwargs.vllm.async_scheduling=True begins a step "
            "before: leave it out"
        )
    config = speculative_config(max_draft)
    return {**given, "vllm": {**own, "speculative_config": config, "async_scheduling": False}}


def prompt_key(row: Mapping[str, Any]) -> PromptId:
    """The name of a row's prompt that is the same in every epoch: its source and its index in the dataset.

    verl's `uid` is new at every fetch, so it names no prompt.

    Args:
        row: of verl's dataset, with `extra_info.index`, and `data_source` where there are several.

    Raises:
        InputError: no index.

    Example: `prompt_key({"data_source": "gsm8k", "extra_info": {"index": 7}})` is "gsm8k/7".
    """
    index = (row.get("extra_info") or {}).get("index")
    if index is None:
        raise InputError(
            "a prompt is named by extra_info.index, and this row has none: write one into the dataset, as verl's "
            "examples of preprocessing do, or leave prompts to be named by their tokens"
        )
    return f"{row.get('data_source', '')}/{index}"


def record_batch(
    store: HistoryStore,
    prompts: Sequence[Any],
    responses: Sequence[Any],
    version: int,
    *,
    prompt_ids: Sequence[PromptId] | None = None,
) -> None:
    """Adds the responses of a batch of verl to a history, for its next `publish`.

    Args:
        store: of the folder that `TREERING_HISTORY` names.
        prompts: token ids of each row without padding, such as `batch["prompts"].unbind()`.
        responses: of each row, likewise.
        version: of the policy that sampled them, such as verl's `global_steps`.
        prompt_ids: of each row, where requests name them; None takes hashes of the prompts' tokens, by which the
            drafter finds prompts that no request names. verl's own agent loops name none.

    Raises:
        InputError: lists of different lengths.

    Example: `record_batch(store, batch["prompts"].unbind(), batch["responses"].unbind(), version=3)`.
    """
    numbers = [len(given) for given in (prompts, responses, prompt_ids) if given is not None]
    if len(set(numbers)) > 1:
        raise InputError(f"each row has a prompt, a response and an id if any has, got {numbers} of them; pair them")
    for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        tokens = np.asarray(prompt, np.int32)
        prompt_id = hash_of_prompt(tokens.tolist()) if prompt_ids is None else prompt_ids[number]
        store.add(prompt_id, [np.asarray(response, np.int32)], version)
