"""History from what vLLM returns. The drafter's own process is no place for it: it sees tokens after the stop."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from treering.errors import InputError
from treering.history.store.store import HistoryStore
from treering.types import PromptId, hash_of_prompt


def record(
    store: HistoryStore, outputs: Iterable[Any], version: int, *, prompt_ids: Sequence[PromptId] | None = None
) -> None:
    """Adds the tokens of vLLM's outputs to a history, for its next `publish`.

    Args:
        store: of the folder that `TREERING_HISTORY` names.
        outputs: vLLM's `RequestOutput` records, as `LLM.generate` returns them.
        version: of the policy that sampled them, >= 0.
        prompt_ids: of each output, as its `request_args` named it; None takes hashes of the prompts' tokens, by which
            the drafter finds requests that have no `request_args`.

    Raises:
        InputError: another number of ids than of outputs, or one without its prompt's tokens.

    Example: `record(store, llm.generate(prompts, sampling), version=3)`, then `store.publish()`.
    """
    found = list(outputs)
    if prompt_ids is not None and len(prompt_ids) != len(found):
        raise InputError(f"each output has a prompt_id, got {len(prompt_ids)} for {len(found)} outputs; pair them")
    for number, output in enumerate(found):
        if prompt_ids is None and not output.prompt_token_ids:
            raise InputError("a prompt without token ids, as of embeddings, has no hash; pass its prompt_ids")
        prompt_id = hash_of_prompt(output.prompt_token_ids) if prompt_ids is None else prompt_ids[number]
        rollouts = [np.asarray(completion.token_ids, np.int32) for completion in output.outputs]
        store.add(prompt_id, rollouts, version)
