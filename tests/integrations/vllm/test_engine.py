"""`VLLMEngine` on real vLLM: the laws of the protocol, log-probs, versions, weight updates, refusals."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.protocol_laws import LAWS, MakeEngine, request_of, run, run_on
from tests.integrations.vllm.llms import MAX_BATCH, MAX_MODEL_LEN, build, disturb, logprobs_of, make_llm
from treering.engine.protocol import WhenRunning
from treering.engine.request import Request, Sampling
from treering.engine.rollout import Rollout
from treering.errors import ConfigError, InputError
from treering.integrations.vllm import VLLMEngine

PROMPT = np.arange(5, 45, dtype=np.int32)

NEED_TOKENS = {
    "batch_and_order_change_no_rollout",
    "a_continued_rollout_equals_an_uninterrupted_one",
    "a_branch_has_its_parents_tokens_and_goes_on_alone",
    "an_aborted_rollout_continues_on_another_engine",
    "reprefill_continues_with_the_new_weights",
}
"""Laws of engines that keep the tokens."""


class Host:
    """One LLM for many engines: each takes it over when those before it are idle."""

    def __init__(self, model: Any, llm: Any) -> None:
        self.model, self.llm = model, llm
        self._first = {name: weight.clone() for name, weight in model.state_dict().items()}

    def engine(self, **settings: Any) -> VLLMEngine:
        """A new engine, with the weights as they are."""
        running = [state.external_req_id for state in self.llm.llm_engine.output_processor.request_states.values()]
        self.llm.llm_engine.abort_request(running)
        return VLLMEngine(self.llm, self.model, **settings)

    def reset(self) -> None:
        self.model.load_state_dict(self._first)


@pytest.fixture(scope="module", params=["tied", "untied"])
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Host:
    model = build(tied=request.param == "tied")
    return Host(model, make_llm(model, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(autouse=True)
def same_weights(host: Host) -> Iterator[None]:
    host.reset()
    yield
    host.reset()


def sampled(num: int = MAX_BATCH, *, prompt: Any = PROMPT, **sampling: Any) -> list[Request]:
    settings = Sampling(**{"max_tokens": 40, **sampling})
    return [Request(prompt_id="p", prompt=prompt, sampling=settings, sample=i) for i in range(num)]


def worst(model: torch.nn.Module, rollouts: list[Rollout], prompt: Any = PROMPT, temperature: float = 1.0) -> float:
    """The largest difference of a log-prob from Hugging Face's."""
    differences = [r.logprobs - logprobs_of(model, prompt, r.tokens, temperature) for r in rollouts]
    return float(np.abs(np.concatenate(differences)).max())


@pytest.mark.parametrize("law", [law for law in LAWS if law.__name__ not in NEED_TOKENS], ids=lambda law: law.__name__)
def test_the_engine_keeps_the_law(host: Host, law: Callable[[MakeEngine], None]) -> None:
    law(lambda max_batch: host.engine(max_batch=max_batch))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_both_logprobs_are_those_of_the_model(host: Host, temperature: float) -> None:
    rollouts = list(host.engine().generate(sampled(temperature=temperature)))
    assert worst(host.model, rollouts, temperature=temperature) < 2e-5
    assert all((rollout.policy_logprobs == rollout.logprobs).all() for rollout in rollouts)


def test_an_update_gives_the_logprobs_of_the_new_weights(host: Host) -> None:
    engine = host.engine()
    before = list(engine.generate(sampled()))
    for version in (1, 2):
        disturb(host.model, seed=version)
        engine.update_weights(version)
        # Prompts that the old weights have left keys and values of.
        rollouts = list(engine.generate(sampled()))
        assert worst(host.model, rollouts) < 1e-5
        assert {int(v) for rollout in rollouts for v in rollout.versions} == {version}
    assert worst(host.model, before) > 0.1
