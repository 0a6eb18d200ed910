"""The embedded engine: the protocol's laws, law 5, and log-probs equal to those of the tree forward."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.engine.protocol_laws import LAWS, MakeEngine
from tests.models import VOCAB, build, build_float64
from treering.engine.protocol import Engine, Request, Rollout, RolloutKey, Sampling
from treering.engine.torch_engine import TorchEngine
from treering.errors import ConfigError, InputError, StateError, UnsupportedError
from treering.families import FAMILIES
from treering.history.draft.drafter import Drafter
from treering.history.store.store import HistoryStore
from treering.model.forward import forward
from treering.tree.forest import Forest

Rollouts = dict[RolloutKey, Rollout]


def group_requests(
    num_prompts: int = 16, group_size: int = 4, *, draw: int = 0, max_tokens: int = 20, **options: object
) -> list[Request]:
    """Return prompts of 1 to 16 tokens, all prefixes of one sequence, so that some are prefixes of others."""
    row = np.random.default_rng(0).integers(0, VOCAB, num_prompts).astype(np.int32)
    sampling = Sampling(max_tokens=max_tokens, **options)
    return [
        Request(prompt_id=f"p{i}", prompt=row[: i + 1], sampling=sampling, draw=draw, sample=sample)
        for i in range(num_prompts)
        for sample in range(group_size)
    ]


def recomputing(engine: TorchEngine) -> TorchEngine:
    """Make the engine copy no keys and values from now on."""
    engine._table._copies = lambda tokens, num_computed: []
    return engine


def run(engine: Engine, requests: Sequence[Request]) -> Rollouts:
    return {rollout.key: rollout for rollout in engine.generate(requests)}


def drafter_of(rollouts: Rollouts, **options: object) -> Drafter:
    store = HistoryStore()
    for rollout in rollouts.values():
        store.add(rollout.prompt_id, [rollout.tokens], 0)
    store.publish()
    return Drafter(store, **options)


def assert_same(actual: Rollouts, expected: Rollouts, tolerance: float = 1e-10) -> None:
    assert actual.keys() == expected.keys()
    for key, rollout in actual.items():
        assert rollout.tokens.tolist() == expected[key].tokens.tolist(), key
        assert rollout.finish_reason == expected[key].finish_reason
        np.testing.assert_allclose(rollout.logprobs, expected[key].logprobs, atol=tolerance)
        np.testing.assert_allclose(rollout.policy_logprobs, expected[key].policy_logprobs, atol=tolerance)


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> Rollouts:
    """Return 64 rollouts, sampled one after another on the plain decoder, without drafts."""
    return run(TorchEngine(model, max_batch=1, backend="plain"), group_requests(stop_tokens=(7,)))


@pytest.mark.parametrize("assert_law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("drafting", ["drafts", "no_drafts"])
def test_the_engine_keeps_the_law(
    assert_law: Callable[[MakeEngine], None], drafting: str, model: PreTrainedModel
) -> None:
    def make(max_batch: int) -> TorchEngine:
        drafter = Drafter(HistoryStore(), min_acceptance=0.01) if drafting == "drafts" else None
        return TorchEngine(model, drafter, max_batch=max_batch, max_tokens=200)

    assert_law(make)


@pytest.mark.parametrize("max_batch", [1, 16])
@pytest.mark.parametrize("backend", ["fused", "plain"])
def test_drafts_batch_and_order_change_no_token(
    model: PreTrainedModel, plain: Rollouts, max_batch: int, backend: str
) -> None:
    requests = group_requests(stop_tokens=(7,))
    np.random.default_rng(1).shuffle(requests)
    engine = TorchEngine(model, drafter_of(plain), max_batch=max_batch, backend=backend, costs="none")
    assert_same(run(engine, requests), plain)
    assert engine.stats.num_accepted > 0
    assert engine.stats.tokens_per_forward > 1.5


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.7}, {"min_p": 0.3, "repetition_penalty": 0.6}], ids=str)
def test_a_drafted_token_is_penalised_for_its_own_prefix(options: dict[str, float], model: PreTrainedModel) -> None:
    requests = group_requests(6, 4, stop_tokens=(7,), temperature=0.6, **options)
    expected = run(TorchEngine(model, max_batch=1, backend="plain"), requests)
    engine = TorchEngine(model, drafter_of(expected, min_acceptance=0.001), max_batch=5, costs="none")
    assert_same(run(engine, requests), expected)
    assert engine.stats.num_accepted > 0
    unpenalised = run(TorchEngine(model), group_requests(6, 4, stop_tokens=(7,), temperature=0.6))
    assert any(expected[key].tokens.tolist() != unpenalised[key].tokens.tolist() for key in expected)


def test_requests_that_join_while_others_run_change_no_token(model: PreTrainedModel, plain: Rollouts) -> None:
    requests = group_requests(stop_tokens=(7,))
    engine = TorchEngine(model, drafter_of(plain), max_batch=7, max_tokens=300, max_prefill=3)
    finished: list[Rollout] = []
    for request in requests:
        engine.submit([request])
        finished += engine.step()
    while engine.num_unfinished:
        finished += engine.step()
    assert_same({rollout.key: rollout for rollout in finished}, plain)


@pytest.mark.parametrize("num_before", [0, 1, 2, 4])
@pytest.mark.parametrize("fails", ["run", "give_feedback"], ids=["computing", "after sampling"])
@pytest.mark.parametrize("asks_again", [False, True])
def test_what_a_failed_pass_left_is_computed_again(
    model: PreTrainedModel, plain: Rollouts, num_before: int, fails: str, asks_again: bool
) -> None:
    requests = group_requests(stop_tokens=(7,))[-16:]
    engine = TorchEngine(model, drafter_of(plain), max_batch=5, max_prefill=9, costs="none")
    part = engine._decoder if fails == "run" else engine._speculation
    call, num_calls = getattr(part, fails), 0

    def fail_once(argument: object) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1 + num_before:
            raise MemoryError
        return call(argument)

    setattr(part, fails, fail_once)
    engine.submit(requests)
    finished: list[Rollout] = []
    for _ in range(num_before):
        finished += engine.step()
    with pytest.raises(MemoryError):
        engine.step()
    left = engine.abort([request.key for request in requests]) if asks_again else []
    keys = {rollout.key for rollout in left}
    finished += engine.generate([request for request in requests if request.key in keys])
    assert_same({rollout.key: rollout for rollout in finished}, {r.key: plain[r.key] for r in requests})


def test_rollouts_that_an_update_finished_outlive_a_pass_that_fails(model: PreTrainedModel) -> None:
    engine = TorchEngine(model, max_batch=2)
    requests = group_requests(1, 3)
    engine.submit(requests)
    engine.step()
    engine.update_weights(1)
    compute = engine._decoder.run
    engine._decoder.run = lambda batch: (_ for _ in ()).throw(MemoryError)
    with pytest.raises(MemoryError):
        engine.step()
    engine._decoder.run = compute
    assert {rollout.key for rollout in engine.generate([])} == {request.key for request in requests}


def test_another_draw_explores_afresh(model: PreTrainedModel, plain: Rollouts) -> None:
    again = run(TorchEngine(model, max_batch=16), group_requests(stop_tokens=(7,), draw=1))
    same = [again[p, 1, s].tokens.tolist() == plain[p, 0, s].tokens.tolist() for p, _, s in plain]
    assert sum(same) < 16
    other_seed = run(TorchEngine(model, max_batch=16, seed=1), group_requests(stop_tokens=(7,)))
    assert sum(other_seed[key].tokens.tolist() == plain[key].tokens.tolist() for key in plain) < 16


@pytest.mark.parametrize("family", [name for name, one in FAMILIES.items() if one.engine == "always"])
def test_policy_logprobs_are_those_of_forward(family: str) -> None:
    model = build_float64(family, seed=3)
    requests = group_requests(8, 2, temperature=0.7, top_p=0.8, top_k=9)
    rollouts = run(TorchEngine(model, max_batch=5), requests)
    sequences = [np.concatenate([r.prompt, rollouts[r.key].tokens]) for r in requests]
    forest = Forest.from_sequences(sequences)
    with torch.no_grad():
        logprobs = forward(model, forest, temperature=0.7).logprobs.numpy()
    indices, offsets = forest.paths()
    for index, request in enumerate(requests):
        own = indices[offsets[index] : offsets[index + 1]][request.prompt.size :]
        np.testing.assert_allclose(rollouts[request.key].policy_logprobs, logprobs[own], atol=1e-10)


@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"), [("qwen3", torch.float32, 2e-5), ("llama", torch.bfloat16, 0.2)]
)
def test_stock_weights_give_the_models_own_logprobs(family: str, dtype: torch.dtype, tolerance: float) -> None:
    model = build(family, attention_bias=True).to(dtype)
    requests = group_requests(4, 2)
    rollouts = run(TorchEngine(model, max_batch=5), requests)
    for request in requests:
        rollout = rollouts[request.key]
        ids = torch.from_numpy(np.concatenate([request.prompt, rollout.tokens]).astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, request.prompt.size - 1 : -1].double()
        expected = logits.log_softmax(-1).gather(1, ids[request.prompt.size :, None])[:, 0]
        assert np.abs(rollout.policy_logprobs - expected.numpy()).mean() < tolerance


def test_the_sampled_distribution_is_the_processed_one(model: PreTrainedModel) -> None:
    """Compare a first token's `logprobs` with probabilities computed from the model's own logits."""
    requests = group_requests(1, 64, max_tokens=1, temperature=0.5, top_k=6, top_p=0.9)
    rollouts = run(TorchEngine(model, max_batch=16), requests)
    with torch.no_grad():
        scaled = model(input_ids=torch.from_numpy(requests[0].prompt[None].astype(np.int64))).logits[0, -1] / 0.5
    top = scaled.topk(6)
    mass = top.values.softmax(-1)
    kept = mass.cumsum(-1) - mass < 0.9
    processed = dict(zip(top.indices[kept].tolist(), top.values[kept].log_softmax(-1).tolist(), strict=True))
    for rollout in rollouts.values():
        assert abs(rollout.logprobs[0] - processed[int(rollout.tokens[0])]) < 1e-10
        assert abs(rollout.policy_logprobs[0] - float(scaled.log_softmax(-1)[rollout.tokens[0]])) < 1e-10


def test_new_weights_are_read_at_the_update_and_not_before(model: PreTrainedModel) -> None:
    mine = build_float64("qwen3", seed=0).eval()
    requests = group_requests(4, 2)
    engine = TorchEngine(mine, max_batch=4)
    before = run(engine, requests)
    other = build_float64("qwen3", seed=5).eval()
    mine.load_state_dict(other.state_dict())
    assert_same(run(engine, requests), before)
    engine.update_weights(1)
    expected = run(TorchEngine(other, max_batch=4), requests)
    assert_same(run(engine, requests), expected)


def test_the_present_version_is_refused_under_changed_weights(model: PreTrainedModel) -> None:
    mine = build_float64("qwen3", seed=0).eval()
    engine = TorchEngine(mine, version=4)
    engine.update_weights(4)
    with torch.no_grad():
        mine.model.layers[1].mlp.down_proj.weight[0, 0] += 1e-9
    with pytest.raises(InputError, match=r"changed since version 4.*update_weights\(5\)"):
        engine.update_weights(4)
    engine.update_weights(5)
    engine.update_weights(5)


@pytest.mark.parametrize(
    ("dtype", "keeps"),
    [(torch.float64, "tokens"), (torch.float32, "tokens"), (torch.bfloat16, "distribution")],
)
def test_tokens_are_kept_where_rounding_lets_them(dtype: torch.dtype, keeps: str) -> None:
    assert TorchEngine(build().to(dtype)).keeps == keeps


def test_a_hook_on_the_model_is_accepted_if_it_keeps_the_logits(model: PreTrainedModel) -> None:
    hooked = build_float64("qwen3").eval()
    handle = hooked.register_forward_hook(lambda _module, _args, _output: None)
    assert_same(run(TorchEngine(hooked), group_requests(2, 2)), run(TorchEngine(model), group_requests(2, 2)))
    handle.remove()
    hooked.register_forward_hook(lambda _module, _args, output: output.__class__(logits=1.1 * output.logits))
    with pytest.raises(UnsupportedError, match="hook"):
        TorchEngine(hooked)


def test_reprefill_recomputes_a_running_rollout(model: PreTrainedModel) -> None:
    """After `reprefill` under changed weights, later tokens are as if the new weights had read the whole context."""
    mine = build_float64("qwen3", seed=0).eval()
    requests = group_requests(3, 2, max_tokens=12)
    engine = TorchEngine(mine, max_batch=8)
    engine.submit(requests)
    for _ in range(5):
        engine.step()
    other = build_float64("qwen3", seed=5).eval()
    mine.load_state_dict(other.state_dict())
    engine.update_weights(4, "reprefill")
    for rollout in run(engine, []).values():
        request = next(r for r in requests if r.key == rollout.key)
        ids = torch.from_numpy(np.concatenate([request.prompt, rollout.tokens]).astype(np.int64))
        with torch.no_grad():
            logprobs = other(input_ids=ids[None]).logits[0, request.prompt.size - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, ids[request.prompt.size :, None])[:, 0].numpy()
        new = rollout.versions == 4
        assert 0 < new.sum() < new.size
        np.testing.assert_allclose(rollout.policy_logprobs[new], expected[new], atol=1e-10)


def test_prompts_of_a_group_are_computed_once(model: PreTrainedModel) -> None:
    requests = group_requests(16, 4)
    engine = TorchEngine(model, max_batch=64)
    run(engine, requests)
    # Each rollout computes the last token of its prompt itself.
    assert engine.stats.num_prefilled == sum(range(16))


def test_a_repeated_prompt_is_recomputed_only_under_new_weights(model: PreTrainedModel) -> None:
    requests = group_requests(13, 6)[-6:]
    engine = TorchEngine(model, max_batch=4)
    rollouts = run(engine, requests[:2]) | run(engine, requests[2:5])
    assert engine.stats.num_prefilled == 12
    assert_same(rollouts, run(TorchEngine(model), requests[:5]))
    engine.update_weights(1)
    run(engine, requests[5:])
    assert engine.stats.num_prefilled == 24


def test_a_stop_string_ends_a_rollout_wherever_it_falls(model: PreTrainedModel) -> None:
    letters = "abcdefghijklmnopqrstuvwxyzABCDEF"

    def decode(tokens: np.ndarray) -> str:
        return "".join(letters[token] for token in tokens)

    requests = group_requests(8, 4, max_tokens=24)
    whole = run(TorchEngine(model, max_batch=8), requests)
    stops = ("ab", "B", "kz", "pp")
    stopping = [
        Request(
            prompt_id=r.prompt_id,
            prompt=r.prompt,
            sample=r.sample,
            sampling=Sampling(max_tokens=24, stop_strings=stops),
        )
        for r in requests
    ]
    engine = TorchEngine(model, drafter_of(whole), max_batch=8, decode=decode)
    stopped = run(engine, stopping)
    for key, rollout in whole.items():
        text = decode(rollout.tokens)
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        expected = text[: min(ends)] if ends else text
        assert decode(stopped[key].tokens) == expected
        assert stopped[key].finish_reason == ("stop" if ends else "length")
    assert {rollout.finish_reason for rollout in stopped.values()} == {"stop", "length"}


def test_input_that_cannot_run_is_refused_and_queues_nothing(model: PreTrainedModel) -> None:
    engine = TorchEngine(model, max_batch=2, max_tokens=50)
    good = group_requests(1, 1)[0]
    prompt = np.array([1, 2], np.int32)
    cases = [
        (Request(prompt_id="a", prompt=prompt, sampling=Sampling(max_tokens=50)), "max_tokens=50"),
        (Request(prompt_id="a", prompt=np.array([VOCAB], np.int32), sampling=Sampling(max_tokens=2)), "tokenizer"),
        (Request(prompt_id="a", prompt=prompt, sampling=Sampling(max_tokens=2, stop_strings=("x",))), "decode"),
    ]
    for bad, rule in cases:
        with pytest.raises(InputError, match=rule):
            engine.submit([good, bad])
        assert engine.num_unfinished == 0
    short = TorchEngine(build_float64(max_position_embeddings=16), max_tokens=50)
    with pytest.raises(InputError, match="positions"):
        short.submit([Request(prompt_id="a", prompt=prompt, sampling=Sampling(max_tokens=16))])


def test_invalid_settings_are_refused(model: PreTrainedModel) -> None:
    for name in ("max_batch", "max_tokens", "max_prefill"):
        with pytest.raises(ConfigError, match=name):
            TorchEngine(model, **{name: 0})
    with pytest.raises(ConfigError, match=r"treering\.Drafter"):
        TorchEngine(model, HistoryStore())
    with pytest.raises(ConfigError, match=r"treering\.HistoryStore"):
        Drafter(None)
    with pytest.raises(ConfigError, match="backend"):
        TorchEngine(model, backend="flash")
    with pytest.raises(UnsupportedError, match="fused"):
        TorchEngine(build().bfloat16(), backend="fused")
    assert TorchEngine(model).backend == "fused on cpu"
    assert TorchEngine(build().bfloat16()).backend == "plain on cpu"


def test_a_model_that_computes_more_than_its_weights_is_refused() -> None:
    hooked = build()
    hooked.model.layers[0].mlp.register_forward_hook(lambda _module, _inputs, output: 1.1 * output)
    with pytest.raises(UnsupportedError, match="hook"):
        TorchEngine(hooked)
    with pytest.raises(UnsupportedError, match="supports llama, mistral, qwen2, qwen3, and this model is 'gemma2'"):
        TorchEngine(build("gemma2"))
    with pytest.raises(UnsupportedError, match="layer 1 has a window of 6 positions"):
        TorchEngine(build("qwen2 window"))
    with pytest.raises(UnsupportedError, match="layer 0 has a window of 6 positions"):
        TorchEngine(build("mistral window"))
    gelu = build(hidden_act="gelu")
    with pytest.raises(UnsupportedError, match="gelu"):
        TorchEngine(gelu)


@pytest.mark.parametrize(("family", "layer", "mixer"), [("qwen3_5", 0, "GatedDeltaNet"), ("bamba", 0, "BambaMixer")])
def test_a_recurrent_layer_is_refused_by_name(family: str, layer: int, mixer: str) -> None:
    from tests.hybrids import build_hybrid

    with pytest.raises(UnsupportedError, match=rf"layer {layer} is recurrent, a \w*{mixer}: .* use vLLM"):
        TorchEngine(build_hybrid(family))


def test_checking_a_model_keeps_its_modes() -> None:
    model = build().train()
    model.model.layers[0].eval()
    TorchEngine(model)
    assert model.training
    assert not model.model.layers[0].training


def test_diverged_weights_are_reported() -> None:
    model = build_float64()
    engine = TorchEngine(model, max_batch=2)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    engine.update_weights(1)
    engine.submit(group_requests(1, 1))
    with pytest.raises(StateError, match="diverged"):
        engine.step()
