"""An engine with pages, kernels and device-side verification, in triton's interpreter, equals a plain one."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.engine.decoder.cuda_cases import INTERPRETED_ONLY
from tests.engine.speculation.scripted_drafts import ScriptedDrafter, Tree
from tests.engine.speculation.test_draft_trees import Truth, script_of
from tests.engine.test_torch_engine import Rollouts, assert_same, group_requests, run
from tests.models import VOCAB, build
from treering.engine.decoder.plain_decoder import TorchDecoder
from treering.engine.protocol import Request, Sampling
from treering.engine.torch_engine import TorchEngine
from treering.errors import UnsupportedError

pytestmark = INTERPRETED_ONLY
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build("qwen3", **SMALL).eval()


def requests_with(beginning: int, endings: list[int], *, group_size: int = 1, max_tokens: int = 4) -> list[Request]:
    """Return requests whose prompts share a beginning and end differently."""
    rng = np.random.default_rng(0)
    common = rng.integers(0, VOCAB, beginning)
    prompts = [np.concatenate([common, rng.integers(0, VOCAB, ending)]).astype(np.int32) for ending in endings]
    sampling = Sampling(max_tokens=max_tokens)
    return [
        Request(prompt_id=f"q{number}", prompt=prompt, sampling=sampling, sample=sample)
        for number, prompt in enumerate(prompts)
        for sample in range(group_size)
    ]


def right_second(right: list[int], rng: np.random.Generator, max_drafts: int) -> Tree:
    """Put the right path between wrong siblings, so that its keys and values move."""
    wrong = [(token + 1) % VOCAB for token in right]
    return [wrong[0], right[0], wrong[1], right[1]][:max_drafts], [-1, -1, 1, 1][:max_drafts]


def with_plain(model: PreTrainedModel, requests: list[Request], **options: object) -> Rollouts:
    return run(TorchEngine(model, backend="plain", **options), requests)


def test_tokens_and_logprobs_are_those_of_the_plain_engine(model: PreTrainedModel) -> None:
    requests = group_requests(2, 2, max_tokens=6)
    expected = with_plain(model, requests)
    drafter = ScriptedDrafter(script_of(right_second, Truth(expected)))
    engine = TorchEngine(model, drafter, max_batch=3, backend="cuda", costs="none")
    assert engine.backend == "cuda on cpu"
    assert_same(run(engine, requests), expected, 1e-4)
    assert engine.stats.num_accepted > 0


def test_prompts_with_a_common_beginning_compute_its_full_pages_once(model: PreTrainedModel) -> None:
    requests = requests_with(20, [3, 9], group_size=2, max_tokens=2)
    engine = TorchEngine(model, max_batch=6, max_prefill=20, backend="cuda")
    assert_same(run(engine, requests), with_plain(model, requests), 1e-4)
    # 16 of the 20 common tokens fill a page; each prompt then computes the rest except its last token.
    assert engine.stats.num_prefilled == 16 + sum(4 + ending - 1 for ending in (3, 9))


def test_a_repeated_prompt_finds_its_pages_until_the_weights_change(model: PreTrainedModel) -> None:
    mine = build("qwen3", **SMALL).eval()
    first, later = ([request] for request in requests_with(17, [2, 4], max_tokens=2))
    engine = TorchEngine(mine, max_batch=2, backend="cuda")
    run(engine, first)
    assert engine.stats.num_prefilled == 18
    assert_same(run(engine, later), with_plain(mine, later), 1e-4)
    assert engine.stats.num_prefilled == 18 + 20 - 16
    other = build("qwen3", seed=5, **SMALL).eval()
    mine.load_state_dict(other.state_dict())
    engine.update_weights(1)
    assert_same(run(engine, later), with_plain(other, later), 1e-4)
    assert engine.stats.num_prefilled == 18 + 20 - 16 + 20


def test_branches_copy_keys_and_values_across_pages(model: PreTrainedModel) -> None:
    """A span of 20 + 16 tokens has three pages; a finished rollout keeps the full ones."""
    first = replace(requests_with(18, [2], max_tokens=16)[0], call=0)
    engine = TorchEngine(model, max_batch=3, max_tokens=200, backend="cuda")
    (parent,) = run(engine, [first]).values()
    before = engine.stats
    branches = [replace(first, sample=at, so_far=parent.branch(at, sample=at)) for at in (3, 13, 15)]
    found = run(engine, branches)
    # Only full pages of the prompt stay cached.
    assert engine.stats.since(before).num_prefilled == 3
    assert_same(found, with_plain(model, branches), 1e-4)


def test_weights_that_the_kernels_do_not_compute_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"the model is torch\.float64"):
        TorchEngine(build("qwen3", **SMALL).double(), backend="cuda")
    with pytest.raises(UnsupportedError, match="even head sizes up to 128, and the model has 160"):
        TorchEngine(build("qwen3", **SMALL | {"head_dim": 160}), backend="cuda")
    monkeypatch.setattr("treering.attention.triton_kernels.INTERPRETED", False)
    with pytest.raises(UnsupportedError, match="needs a CUDA device, and the model is on cpu"):
        TorchEngine(build("qwen3", **SMALL), backend="cuda")
    monkeypatch.setattr("treering.engine.backends.has_triton", lambda: False)
    with pytest.raises(UnsupportedError, match="triton, which is not installed"):
        TorchEngine(build("qwen3", **SMALL), backend="cuda")


def test_without_a_device_auto_never_uses_cuda(model: PreTrainedModel) -> None:
    assert TorchEngine(model).backend == "fused on cpu"
    engine = TorchEngine(build("qwen3", **SMALL).bfloat16())
    assert engine.backend == "plain on cpu"
    assert isinstance(engine._decoder, TorchDecoder)


def test_a_trainer_may_capture_after_an_engine_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []

    def capture(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        # Create a tensor during the capture, like torch's random number state.
        made.append(torch.zeros(1))
        return work

    monkeypatch.setattr("treering.engine.decoder.cuda.cuda_decoder.capture", capture)
    requests = group_requests(2, 2, max_tokens=4)
    with torch.inference_mode():
        model = build("qwen3", **SMALL).eval()
        engine = TorchEngine(model, max_batch=4, backend="cuda")
        inside = run(engine, requests)
    assert made
    assert not any(tensor.is_inference() for tensor in made)
    # Outside inference mode the same engine writes to the same memory.
    assert_same(run(engine, requests), inside, 0.0)
