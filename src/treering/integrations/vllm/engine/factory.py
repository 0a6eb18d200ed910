"""Makes the engines of a loop, all with one LLM: an LLM takes half a minute to start, and an engine none."""

from typing import Any

from torch import nn

from treering.engine.stop_strings import Decode
from treering.history.draft.drafter import Drafter
from treering.integrations.vllm.engine.launch import LLMSettings, make_llm
from treering.integrations.vllm.engine.llm_requirements import Verification
from treering.integrations.vllm.engine.sampling import Truncated
from treering.integrations.vllm.engine.vllm_engine import VLLMEngine


class VLLMEngineFactory:
    """An `EngineFactory` of `RlLoop`; the LLM starts with the first engine.

    Example: `RlLoop(model, task, VLLMEngineFactory(model, settings), optim=optim, options=options)`.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: LLMSettings,
        *,
        seed: int = 0,
        decode: Decode | None = None,
        truncated: Truncated = "refuse",
        verification: Verification = "rejection",
    ) -> None:
        """See `make_llm` and `VLLMEngine` for the arguments."""
        self._model, self._settings = model, settings
        self._seed, self._decode = seed, decode
        self._truncated: Truncated = truncated
        self._verification: Verification = verification
        self._llm: Any = None

    def __call__(self, drafter: Drafter | None, version: int) -> VLLMEngine:
        """An engine with the model's present weights; the one before it must be idle, and is not used again.

        Args:
            drafter: what the drafter inside vLLM has learnt before, and where it goes; None without drafts.
            version: policy version of the weights.
        """
        if self._llm is None:
            self._llm = make_llm(self._model, self._settings)
        return VLLMEngine(
            self._llm,
            self._model,
            version=version,
            seed=self._seed,
            decode=self._decode,
            truncated=self._truncated,
            verification=self._verification,
            drafter=drafter,
        )
