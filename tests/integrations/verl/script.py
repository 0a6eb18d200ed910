"""A server that answers verl's requests from a script. It does not import verl, so that its process starts quickly."""

from types import SimpleNamespace
from typing import Any

import numpy as np

EOS, FIRST_WORD, VOCAB = 1, 4, 64


class ScriptedServer:
    """Server that answers the k-th request for a prompt with the prompt's k-th response, whoever asks."""

    def __init__(self) -> None:
        self._num_asked: dict[tuple[int, ...], int] = {}

    async def generate(self, prompt_ids: list[int], **request: Any) -> SimpleNamespace:
        """Return the fields of verl's `TokenOutput`."""
        prompt = tuple(prompt_ids)
        number = self._num_asked.get(prompt, 0)
        self._num_asked[prompt] = number + 1
        return SimpleNamespace(
            token_ids=response_of(prompt, number),
            log_probs=None,
            routed_experts=None,
            num_preempted=0,
            stop_reason="completed",
            extra_fields={"global_steps": 0},
        )

    async def sleep(self) -> None: ...

    wake_up = sleep


def response_of(prompt: tuple[int, ...], number: int) -> list[int]:
    """Return responses of a prompt that begin alike, the later ones for longer."""
    shared = np.random.default_rng(prompt).integers(FIRST_WORD, VOCAB, 12).tolist()
    own = np.random.default_rng([*prompt, number]).integers(FIRST_WORD, VOCAB, 3 + 2 * number).tolist()
    return [*shared[: 3 * number], *own, EOS]
