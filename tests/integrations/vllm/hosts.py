"""An LLM that many engines of the tests use, one after another."""

from typing import Any

from tests.integrations.vllm.llms import build
from treering.integrations.vllm import VLLMEngine


class Host:
    """One model and its LLM: each engine takes it over from those before it."""

    def __init__(self, model: Any, llm: Any, *, is_tied: bool) -> None:
        self.model, self.llm, self.is_tied = model, llm, is_tied
        self._first = {name: weight.clone() for name, weight in model.state_dict().items()}

    def engine(self, **settings: Any) -> VLLMEngine:
        """A new engine, with the weights as they are."""
        states = self.llm.llm_engine.output_processor.request_states.values()
        self.llm.llm_engine.abort_request([state.external_req_id for state in states])
        return VLLMEngine(self.llm, self.model, **settings)

    def reset(self) -> None:
        """The first weights again."""
        self.model.load_state_dict(self._first)


def copy_of(model: Any, *, tied: bool) -> Any:
    """A model with the same weights, its own from then on."""
    copied = build(tied=tied)
    copied.load_state_dict(model.state_dict())
    return copied
