"""GPU-only tests of the engine: compiled kernels, captured passes, one wait per step."""

from dataclasses import replace

import pytest
import torch

from tests.engine.decoder.cuda_cases import batch_of
from tests.engine.decoder.test_cuda_decoder import FILLING, GROWING, assert_close, both, weights_of
from tests.engine.decoder.test_cuda_engine import right_second
from tests.engine.decoder.test_cuda_verify import everything, keys_of
from tests.engine.speculation.scripted_drafts import ScriptedDrafter
from tests.engine.speculation.test_draft_trees import Truth, right_last, script_of
from tests.engine.test_torch_engine import assert_same, group_requests, run
from tests.models import VOCAB, build
from treering.engine.sampling.torch_sampling import sample
from treering.engine.torch_engine import TorchEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # Torch and triton emit unrelated warnings.
    pytest.mark.filterwarnings("default"),
]


# Few combinations, since each compiles its kernels.
@pytest.mark.parametrize(
    ("head_dim", "dtype", "tolerance"),
    [(128, torch.bfloat16, 0.03), (64, torch.float16, 0.01), (128, torch.float32, 1e-4)],
)
def test_captured_and_started_passes_give_the_logits_of_the_plain_decoder(
    head_dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    weights = weights_of(build("qwen3", head_dim=head_dim).to("cuda", dtype))
    # The second run of each batch replays its graph.
    batches = [batch_of(rows, VOCAB) for rows in (FILLING, GROWING, FILLING, GROWING)]
    assert_close(*both(weights, batches), tolerance)


@pytest.mark.parametrize("shape", [right_last, right_second], ids=lambda shape: shape.__name__)
def test_drafts_change_no_token_and_float32_has_those_of_the_plain_engine(shape: object) -> None:
    model = build("qwen3").eval().to("cuda")
    requests = group_requests(8, 4, max_tokens=24)
    expected = run(TorchEngine(model, max_batch=32, backend="plain"), requests)
    plain = TorchEngine(model, max_batch=7)
    assert plain.backend == "cuda on cuda"
    assert_same(run(plain, requests), expected, 1e-3)
    drafting = TorchEngine(model, ScriptedDrafter(script_of(shape, Truth(expected))), max_batch=16)
    assert_same(run(drafting, requests), expected, 1e-3)
    assert drafting.stats.num_accepted > 0


def test_branches_have_the_tokens_of_an_engine_that_reuses_nothing() -> None:
    model = build("qwen3").eval().to("cuda")
    requests = [replace(request, call=0) for request in group_requests(8, 2, max_tokens=40)]
    engine = TorchEngine(model, max_batch=7)
    parents = run(engine, requests)
    before = engine.stats
    branches = [
        replace(request, sample=9 + number, so_far=parents[request.key].branch(5 + 2 * number, sample=9 + number))
        for number, request in enumerate(requests)
    ]
    found = run(engine, branches)
    # The prompts fill no page, so all their tokens except the last are computed again.
    assert engine.stats.since(before).num_prefilled == sum(range(8))
    assert_same(found, run(TorchEngine(model, max_batch=7, backend="plain"), branches), 1e-3)


def test_a_trainer_captures_after_an_engine_in_inference_mode() -> None:
    requests = group_requests(2, 2, max_tokens=4)
    with torch.inference_mode():
        engine = TorchEngine(build("qwen3").eval().to("cuda"), max_batch=4)
        inside = run(engine, requests)
    graph, number = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        number += torch.rand(1, device="cuda")
    graph.replay()
    assert float(number) > 0
    assert_same(run(engine, requests), inside, 0.0)


def test_new_weights_are_read_by_passes_that_are_captured_already() -> None:
    model, other = (build("qwen3", seed=seed).eval().to("cuda") for seed in (0, 5))
    requests = group_requests(3, 2, max_tokens=8)
    engine = TorchEngine(model, max_batch=6)
    run(engine, requests)
    model.load_state_dict(other.state_dict())
    engine.update_weights(1)
    assert_same(run(engine, requests), run(TorchEngine(other, max_batch=6, backend="plain"), requests), 1e-3)


@pytest.mark.parametrize("vocabulary", [1000, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gumbel_max_samples_equal_the_reference(vocabulary: int, dtype: torch.dtype) -> None:
    from treering.engine.decoder.cuda.verify import gumbel_max

    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(64, vocabulary, generator=generator)).to("cuda", dtype)
    keys, positions = keys_of(64).to("cuda"), torch.arange(64, device="cuda")
    temperature = torch.linspace(0.3, 2.0, 64, dtype=torch.float64, device="cuda")
    options = {name: values.to("cuda") for name, values in everything(64).items()}
    samples = gumbel_max(logits, keys, positions, temperature)
    expected = sample(logits, keys=keys, positions=positions, temperature=temperature, **options)
    assert samples.tokens.tolist() == expected.tokens.tolist()
    assert torch.allclose(samples.logprobs, expected.logprobs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("drafting", ["none", "trees", "duplicates"])
def test_a_step_waits_for_the_device_once(drafting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3").eval().to("cuda")
    requests = group_requests(4, 2, max_tokens=20)
    expected = run(TorchEngine(model, max_batch=8), requests)
    drafter = ScriptedDrafter(script_of(right_last, Truth(expected))) if drafting == "trees" else None
    engine = TorchEngine(model, drafter, max_batch=8, costs="none")
    engine.shares_rows = drafting == "duplicates"
    run(engine, requests)
    waits: list[object] = []
    monkeypatch.setattr(
        "treering.engine.decoder.cuda.verify.to_host", lambda tensor: waits.append(tensor) or tensor.cpu().numpy()
    )
    num_before = engine.stats.num_forwards
    # Torch warns of every other wait; the intended one is inside `to_host`, which is replaced.
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as told:
            run(engine, requests)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    num_steps = engine.stats.num_forwards - num_before
    assert len(waits) <= num_steps
    assert len(told) == len(waits)
