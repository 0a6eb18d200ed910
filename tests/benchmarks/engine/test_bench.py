"""The engine benchmark: its baseline is as described, every side samples what it is timed for, its report adds up."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks.engine import drafting as engine_drafting
from benchmarks.engine.cases import Policy
from benchmarks.engine.drafting import DraftingSide, measure_drafting
from benchmarks.engine.generate import CACHES, generate
from benchmarks.tree.cases import build_model
from transformers import PreTrainedModel

from tests.benchmarks.tree.trajectories import TINY
from treering.engine.protocol import Request
from treering.engine.torch_engine import TorchEngine
from treering.history.budget import VerifyCosts
from treering.rl.tasks.sums import ChainedSums

NUM_PROMPTS, GROUP_SIZE, MAX_TOKENS = 3, 2, 16


def tiny_model(*, certainty: float = 1.0) -> PreTrainedModel:
    """Build a model for the sums' vocabulary; with higher certainty its rollouts resemble one another more."""
    model = build_model(shape=replace(TINY, num_layers=2, vocab_size=ChainedSums(1).vocab_size)).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(certainty)
        # Random layers add next to nothing, so the context of a token would not matter.
        for name, weight in model.named_parameters():
            if "_proj" in name:
                weight.mul_(12)
    return model


def tiny_policy(*, certainty: float = 200.0) -> Policy:
    return Policy(
        model=tiny_model(certainty=certainty),
        task=ChainedSums(NUM_PROMPTS, max_number=9),
        group_size=GROUP_SIZE,
        max_tokens=MAX_TOKENS,
        num_steps=0,
        accuracy=0.0,
    )


@pytest.fixture(autouse=True)
def drafting_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_drafting, "thread_counts", lambda: [1])


@pytest.fixture(autouse=True)
def drafts_that_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make drafts independent of how busy the testing machine is."""
    costs = VerifyCosts(num_tokens=np.array([1, 64]), seconds=np.array([1.0, 1.1]))
    monkeypatch.setattr(TorchEngine, "measure_costs", lambda self: costs)


def tokens_of(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize("cache", CACHES)
def test_generate_samples_from_the_model_at_temperature_one_and_from_all_tokens(cache: str) -> None:
    model = tiny_model(certainty=10.0)
    prompt = tokens_of(1, 2, 3)
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(prompt).long()[None]).logits[0, -1].softmax(-1).numpy()
    rollouts = generate(model, [prompt] * 4000, batch_size=4000, max_tokens=1, cache=cache)
    assert expected.min() < 0.03
    assert expected.max() > 0.12
    counts = np.bincount([int(tokens[0]) for tokens in rollouts], minlength=expected.size)
    # Chi-square with 15 degrees of freedom exceeds 50 once in 10^5 times.
    assert ((counts - 4000 * expected) ** 2 / (4000 * expected)).sum() < 50


@pytest.mark.parametrize("cache", CACHES)
def test_generate_gives_each_prompt_its_rollout_whatever_batch_it_is_padded_in(cache: str) -> None:
    # At this certainty a model always draws its likeliest token, so rollouts can be compared.
    model = tiny_model(certainty=1e5)
    prompts = [tokens_of(*range(1, length)) for length in (3, 7, 5, 2)]
    alone = [generate(model, [prompt], batch_size=1, max_tokens=6, cache=cache)[0].tolist() for prompt in prompts]
    together = generate(model, prompts, batch_size=3, max_tokens=6, cache=cache)
    assert [tokens.tolist() for tokens in together] == alone
    for prompt, tokens in zip(prompts, alone, strict=True):
        sequence = prompt.tolist()
        for token in tokens:
            with torch.no_grad():
                assert int(model(input_ids=torch.tensor([sequence])).logits[0, -1].argmax()) == token
            sequence.append(token)


def test_a_side_that_changed_tokens_would_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lossy(DraftingSide):
        def run(self, requests: list[Request]) -> dict:
            first, *others = super().run(requests).items()
            return {first[0]: (first[1] + 1) % 4, **dict(others)}

    monkeypatch.setattr(engine_drafting, "DraftingSide", Lossy)
    (result,) = measure_drafting(tiny_policy(), num_runs=1, on_progress=lambda _: None, batch_sizes=(2,))
    assert result["drafting"]["num_differing"] == 1
