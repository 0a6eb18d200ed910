"""Prompts with images keep law 5 and stock log-probs, and tell apart images whose placeholders are equal."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tests.engine.test_torch_engine import Rollouts, assert_same, drafter_of, recomputing, run
from tests.image_models import IMAGE, VIDEO, Sequenced, build, image, sequence, stock_inputs
from tests.models import build_float64
from treering.engine.protocol import Request, Rollout, Sampling
from treering.engine.torch_engine import TorchEngine
from treering.errors import InputError, UnsupportedError

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "internvl")
TEMPERATURE = 1.5


def prompts(family: str) -> dict[str, Sequenced]:
    """Return prompts with equal placeholders of different images, common beginnings, and only text."""
    first, second, wide = image(family, 0), image(family, 1), image(family, 2, wide=True)
    return {
        "first": sequence(5, 6, first, 7, 8),
        "second": sequence(5, 6, second, 7, 8),
        "two": sequence(5, 6, first, 7, wide, 9, 10, 11),
        "text": sequence(5, 6, 7),
    }


def requests(family: str, *, draw: int = 0) -> list[Request]:
    return [
        Request(
            prompt_id=name,
            prompt=np.array(one.tokens, np.int32),
            images=tuple(one.placed),
            sampling=Sampling(max_tokens=10, temperature=TEMPERATURE),
            draw=draw,
            sample=sample,
        )
        for name, one in prompts(family).items()
        for sample in range(3)
    ]


def stock_logprobs(model: nn.Module, one: Sequenced, rollout: Rollout) -> np.ndarray:
    """Return log-probs of stock transformers on the whole sequence, and without placeholders: [2, tokens]."""
    inputs = stock_inputs(model, replace(one, tokens=[*one.tokens, *rollout.tokens.tolist()]))
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits[0, len(one.tokens) - 1 : -1].double() / TEMPERATURE
    others = logits.clone()
    others[:, [IMAGE, VIDEO][: 2 if model.config.model_type.startswith("qwen") else 1]] = -torch.inf
    tokens = torch.tensor(rollout.tokens).long()[:, None]
    return np.stack([each.log_softmax(-1).gather(1, tokens)[:, 0].numpy() for each in (logits, others)])


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return build(request.param).eval()


@pytest.fixture(scope="module")
def alone(model: nn.Module) -> Rollouts:
    """Sample each rollout in an engine that reuses nothing, one after another, without drafts."""
    engine = recomputing(TorchEngine(model, max_batch=1, max_tokens=200))
    assert engine.backend == "plain on cpu (the model takes images)"
    return run(engine, requests(model.config.model_type))


def test_logprobs_are_those_of_stock_transformers(model: nn.Module, alone: Rollouts) -> None:
    for rollout in alone.values():
        expected = stock_logprobs(model, prompts(model.config.model_type)[rollout.prompt_id], rollout)
        np.testing.assert_allclose([rollout.policy_logprobs, rollout.logprobs], expected, atol=1e-5)
        # A placeholder without an image cannot be trained.
        assert IMAGE not in rollout.tokens
    assert alone["first", 0, 0].tokens.tolist() != alone["second", 0, 0].tokens.tolist()


def test_drafts_batch_and_chunks_change_no_token(model: nn.Module, alone: Rollouts) -> None:
    # Chunks of three tokens begin and end inside images.
    engine = TorchEngine(model, drafter_of(alone), max_batch=12, max_prefill=3, costs="none")
    assert_same(run(engine, requests(model.config.model_type)), alone, tolerance=1e-5)
    assert engine.stats.num_accepted > 0


def test_rehearsed_rollouts_are_those_of_one_go(model: nn.Module, alone: Rollouts) -> None:
    engine = TorchEngine(model, max_batch=12, max_prefill=40)
    wanted = requests(model.config.model_type)
    engine.rehearse(wanted)
    while engine.is_rehearsing:
        engine.step()
    tokens = engine.take_rehearsals()
    assert_same(run(engine, [replace(each, rehearsed=tokens[each.key]) for each in wanted]), alone, tolerance=1e-5)
    assert engine.stats.num_kept == engine.stats.num_verified > 60


def test_continued_rollouts_are_those_of_one_go(model: nn.Module, alone: Rollouts) -> None:
    engine = TorchEngine(model, max_batch=12)
    wanted = requests(model.config.model_type)
    engine.submit(wanted)
    while min(engine.progress().values(), default=0) < 4:
        engine.step()
    halves = {rollout.key: rollout for rollout in engine.abort([request.key for request in wanted])}
    continued = [replace(request, so_far=halves[request.key]) for request in wanted]
    assert_same(run(engine, continued), alone, tolerance=1e-5)


def test_each_image_is_computed_once_in_a_version_by_the_weights_of_it() -> None:
    model = build("qwen2_5_vl").eval()
    engine = TorchEngine(model, max_batch=4, max_tokens=400)
    vision_tower = engine._vision._part.model
    calls = []
    vision_tower.visual.register_forward_hook(lambda *_: calls.append(None))
    run(engine, requests("qwen2_5_vl"))
    assert len(calls) == 3
    before = run(engine, requests("qwen2_5_vl", draw=1))
    assert len(calls) == 3
    with torch.no_grad():
        for weight in model.model.visual.parameters():
            weight.add_(0.05)
    with pytest.raises(InputError, match="weights have changed since version 0"):
        engine.update_weights(0)
    # Until it is updated, the engine keeps the weights of its version.
    assert_same(run(engine, requests("qwen2_5_vl", draw=1)), before, tolerance=1e-6)
    engine.update_weights(1)
    after = run(engine, requests("qwen2_5_vl", draw=1))
    assert len(calls) == 6
    one = after["two", 1, 0]
    expected = stock_logprobs(model, prompts("qwen2_5_vl")["two"], one)
    np.testing.assert_allclose([one.policy_logprobs, one.logprobs], expected, atol=1e-5)


def test_an_engine_refuses_what_it_cannot_sample() -> None:
    with pytest.raises(UnsupportedError, match="gemma3_text"):
        TorchEngine(build("gemma3"))
    seeing = build("qwen2_5_vl")
    with pytest.raises(UnsupportedError, match="fused backend runs only text models"):
        TorchEngine(seeing, backend="fused")
    engine = TorchEngine(seeing, max_tokens=200)
    [first, *_] = requests("qwen2_5_vl")
    with pytest.raises(InputError, match="without an image"):
        engine.submit([replace(first, images=())])
    other = sequence(5, image("internvl", 0), 6)
    with pytest.raises(InputError, match="make images with the processor of this model"):
        engine.submit([replace(first, prompt=np.array(other.tokens), images=tuple(other.placed))])
    with pytest.raises(InputError, match="must continue after its images"):
        replace(first, prompt=first.prompt[:-2])
    with pytest.raises(InputError, match=r"has images \(1\), and"):
        TorchEngine(build_float64("qwen3"), max_tokens=200).submit([replace(first, prompt=first.prompt % 30)])
