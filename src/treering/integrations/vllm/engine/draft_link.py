"""The drafter inside vLLM's worker, seen from the loop: its history is refreshed, and what it learns comes back."""

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from treering.integrations.vllm.array_bytes import as_array, as_bytes


class LearntState(Protocol):
    """What a drafter has learnt; a `Drafter` is one."""

    def state(self) -> dict[str, NDArray[Any]]:
        """The learnt arrays by name."""

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continues from a `state`."""


class DraftLink:
    """Keeps what the drafter inside vLLM has learnt in the loop's drafter, which is saved in checkpoints.

    Example: after `refresh` the loop's `drafter.state()` is what the drafter inside vLLM has learnt so far.
    """

    def __init__(self, llm: Any, drafter: LearntState | None) -> None:
        """Lets the drafter inside vLLM read the history, and go on from what `drafter` has learnt, if there is one."""
        self._llm = llm
        self._drafter = drafter
        llm.collective_rpc("treering_refresh")
        if drafter is not None:
            state = {name: as_bytes(values) for name, values in drafter.state().items()}
            llm.collective_rpc("treering_load_state", args=(state,))

    def refresh(self) -> None:
        """Lets the drafter inside vLLM read the newest history, and takes over what it has learnt."""
        self._llm.collective_rpc("treering_refresh")
        if self._drafter is not None:
            (state, *_) = self._llm.collective_rpc("treering_state")
            self._drafter.load_state({name: as_array(content) for name, content in state.items()})
