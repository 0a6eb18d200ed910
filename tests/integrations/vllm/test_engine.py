"""`VLLMEngine` on real vLLM: the laws of the protocol, log-probs, versions, weight updates, refusals, drafts."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.protocol_laws import LAWS, MakeEngine, run, run_on
from tests.integrations.vllm.llms import MAX_BATCH, MAX_MODEL_LEN, Host, K, build, disturb, drafts, logprobs_of
from tests.rl.runs import PLAIN, TinyTask, options
from treering.engine.protocol import Request, Rollout, RolloutKey, Sampling, WhenRunning
from treering.errors import ConfigError, InputError, UnsupportedError
from treering.integrations.vllm import VLLMEngine
from treering.integrations.vllm.llm_requests import noise_seed, routes_so_far, sampling_params
from treering.integrations.vllm.vllm_settings import read_request_args
from treering.rl.loop import RlLoop

PROMPT = np.arange(5, 45, dtype=np.int32)

NEED_TOKENS = {
    "batch_and_order_change_no_rollout",
    "a_continued_rollout_equals_an_uninterrupted_one",
    "a_branch_has_its_parents_tokens_and_goes_on_alone",
    "an_aborted_rollout_continues_on_another_engine",
    "reprefill_continues_with_the_new_weights",
}
"""Laws of engines that keep the tokens."""

MANY_ENGINES = "the_present_version_again_changes_nothing"
"""A law that uses an engine after the next one has taken its LLM."""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    # Its head is tied, so an update must write it too; the models of other files are not tied.
    return Host(build(tied=True), tmp_path_factory.mktemp("tied"))


@pytest.fixture(autouse=True)
def same_weights(host: Host) -> Iterator[None]:
    host.reset()
    yield
    host.reset()


def sampled(num: int = MAX_BATCH, *, prompt: Any = PROMPT, **sampling: Any) -> list[Request]:
    settings = Sampling(**{"max_tokens": 40, **sampling})
    return [Request(prompt_id="p", prompt=prompt, sampling=settings, sample=i) for i in range(num)]


def worst(model: torch.nn.Module, rollouts: list[Rollout], prompt: Any = PROMPT, temperature: float = 1.0) -> float:
    """Return the largest difference of a log-prob from Hugging Face's."""
    differences = [r.logprobs - logprobs_of(model, prompt, r.tokens, temperature) for r in rollouts]
    return float(np.abs(np.concatenate(differences)).max())


@pytest.mark.parametrize(
    "assert_law",
    [law for law in LAWS if law.__name__ not in {*NEED_TOKENS, MANY_ENGINES}],
    ids=lambda law: law.__name__,
)
def test_the_engine_keeps_the_law(host: Host, assert_law: Callable[[MakeEngine], None]) -> None:
    assert_law(lambda max_batch: host.engine(max_batch=max_batch))


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
        # Prompts whose keys and values under the old weights are cached.
        rollouts = list(engine.generate(sampled()))
        assert worst(host.model, rollouts) < 1e-5
        assert {int(v) for rollout in rollouts for v in rollout.versions} == {version}
    assert worst(host.model, before) > 0.1


@pytest.mark.parametrize("when_running", ["finish", "abort", "reprefill"])
def test_each_token_has_the_logprob_of_its_own_version(host: Host, when_running: WhenRunning) -> None:
    models = {0: deepcopy(host.model)}
    engine = host.engine(max_batch=4)
    engine.submit(sampled(6))
    for _ in range(12):
        engine.step()
    disturb(host.model)
    engine.update_weights(1, when_running)
    models[1] = deepcopy(host.model)
    rollouts = run_on(engine).values()
    assert len(rollouts) == 6
    for rollout in rollouts:
        for version, model in models.items():
            own = rollout.versions == version
            difference = np.abs(rollout.logprobs - logprobs_of(model, PROMPT, rollout.tokens))
            assert difference[own].max(initial=0) < 2e-5
    mixed = [rollout for rollout in rollouts if len(set(rollout.versions.tolist())) == 2]
    assert len(mixed) == (4 if when_running == "reprefill" else 0)
    whole = [rollout for rollout in rollouts if rollout.num_tokens == 40]
    assert len(whole) == (2 if when_running == "abort" else 6)


def test_routes_are_looked_for_where_vllm_keeps_them(host: Host) -> None:
    engine = host.engine()
    engine.submit(sampled(1))
    engine.step()
    llm = host.llm.llm_engine
    assert llm.output_processor.external_req_ids.keys() == {"treering-0"}
    # A dense model has none.
    assert routes_so_far(llm, "treering-0") is None
    (inside,) = llm.output_processor.request_states.values()
    inside.routed_experts_chunks += [np.zeros((2, 3, 1), np.uint8), np.ones((1, 3, 1), np.uint8)]
    assert routes_so_far(llm, "treering-0")[:, 0, 0].tolist() == [0, 0, 1]


def test_the_present_version_again_changes_nothing(host: Host) -> None:
    engine = host.engine(version=3)
    whole = run(engine, sampled(1))["p", 0, 0]
    engine.submit(sampled(1))
    engine.step()
    for when_running in ("finish", "abort", "reprefill"):
        engine.update_weights(3, when_running)
    (rollout,) = run_on(engine).values()
    assert (rollout.tokens.tolist(), set(rollout.versions.tolist())) == (whole.tokens.tolist(), {3})


def test_one_version_names_one_set_of_weights(host: Host) -> None:
    engine = host.engine(version=2)
    disturb(host.model)
    with pytest.raises(InputError, match=r"changed since version 2.*update_weights\(3\)"):
        engine.update_weights(2)


def test_seeds_differ_only_by_key_and_index(host: Host) -> None:
    """Without drafts, each rollout has the same tokens in another order and in its own batch."""
    together = run(host.engine(seed=5), sampled())
    reverse = run(host.engine(seed=5, max_batch=3), sampled()[::-1])
    assert {key: r.tokens.tolist() for key, r in together.items()} == {
        key: r.tokens.tolist() for key, r in reverse.items()
    }
    assert len({tuple(rollout.tokens.tolist()) for rollout in together.values()}) == len(together)
    other = run(host.engine(seed=6), sampled(1))
    assert other["p", 0, 0].tokens.tolist() != together["p", 0, 0].tokens.tolist()
    keys = [("p", 0, 0), ("p", 0, 1), ("p", 1, 0), (1, 0, 0), ("1", 0, 0)]
    assert len({noise_seed(0, key, start) for key in keys for start in (0, 1)}) == 10


def test_a_continued_rollout_has_the_models_logprobs(host: Host) -> None:
    engine = host.engine()
    part = run(engine, sampled(1, max_tokens=20))["p", 0, 0]
    whole = run(engine, [replace(sampled(1)[0], so_far=part)])["p", 0, 0]
    assert whole.tokens[:20].tolist() == part.tokens.tolist()
    assert worst(host.model, [whole]) < 2e-5


def test_a_stop_string_ends_a_rollout_with_the_token_that_completes_it(host: Host) -> None:
    decode = lambda tokens: "".join(chr(48 + int(token)) for token in tokens)  # noqa: E731
    whole = run(host.engine(), sampled(1))["p", 0, 0]
    text = decode(whole.tokens)
    stop = text[11:13]
    end = text.index(stop) + 2
    engine = host.engine(decode=decode)
    rollout = run(engine, sampled(1, stop_strings=(stop,)))["p", 0, 0]
    assert (rollout.tokens.tolist(), rollout.finish_reason) == (whole.tokens[:end].tolist(), "stop")
    with pytest.raises(InputError, match="stop strings need a decoder"):
        host.engine().submit(sampled(1, stop_strings=("x",)))


@pytest.mark.parametrize(
    "sampling",
    [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"repetition_penalty": 1.5}, {"top_k": 12, "min_p": 0.1}],
    ids=str,
)
def test_cuts_are_those_of_the_sampling_parameters(host: Host, sampling: dict[str, float]) -> None:
    """The log-probs are those of Hugging Face's logits, cut by an independent implementation of `Sampling`."""
    with pytest.raises(ConfigError, match=r"policy_logprobs.*truncated=\"recompute\""):
        host.engine().submit(sampled(1, **sampling))
    rollouts = list(host.engine(truncated="recompute").generate(sampled(4, temperature=0.8, **sampling)))
    for rollout in rollouts:
        assert np.isnan(rollout.policy_logprobs).all()
        expected = cut_logprobs(host.model, rollout, Sampling(max_tokens=40, temperature=0.8, **sampling))
        np.testing.assert_allclose(rollout.logprobs, expected, atol=2e-5)


def cut_logprobs(model: Any, rollout: Rollout, sampling: Sampling) -> Any:
    ids = torch.tensor([[*PROMPT.tolist(), *rollout.tokens.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0].double()
    found = []
    for i, token in enumerate(rollout.tokens.tolist()):
        end = PROMPT.size + i
        row = logits[end - 1].clone()
        seen = sorted(set(ids[0, :end].tolist()))
        row[seen] = torch.where(
            row[seen] > 0, row[seen] / sampling.repetition_penalty, row[seen] * sampling.repetition_penalty
        )
        probabilities = (row / sampling.temperature).softmax(0)
        order = probabilities.argsort(descending=True)
        kept = order[: sampling.top_k or order.numel()]
        mass = probabilities[kept] / probabilities[kept].sum()
        kept = kept[: int((mass.cumsum(0) < sampling.top_p).sum()) + 1]
        kept = kept[probabilities[kept] >= sampling.min_p * probabilities.max()]
        assert token in kept
        found.append(float((probabilities[token] / probabilities[kept].sum()).log()))
    return np.array(found)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": 0.001}, r"temperature 0.01 or more"),
        ({"min_p": 0.1, "top_p": 0.9}, r"min_p before top_p"),
        ({"max_tokens": MAX_MODEL_LEN}, rf"needs max_model_len={MAX_MODEL_LEN + PROMPT.size}"),
    ],
)
def test_what_vllm_would_sample_otherwise_is_refused(host: Host, sampling: dict[str, Any], message: str) -> None:
    engine = host.engine(truncated="recompute")
    with pytest.raises((ConfigError, InputError), match=message):
        engine.submit(sampled(2, **sampling))
    assert engine.num_unfinished == 0


def test_settings_are_checked(host: Host) -> None:
    for settings, message in (
        ({"max_batch": MAX_BATCH + 1}, "max_num_seqs"),
        ({"truncated": "no"}, "truncated must be one of"),
        ({"verification": "no"}, "verification must be one of"),
        ({"version": -1}, "version of an engine"),
    ):
        with pytest.raises(ConfigError, match=message):
            host.engine(**settings)
    with pytest.raises(InputError, match="vocab_size is 64 and the model's is 32"):
        VLLMEngine(host.llm, build(tied=True, vocab_size=32))


@pytest.mark.parametrize(
    ("section", "name", "value", "message"),
    [
        ("model_config", "logprobs_mode", "raw_logprobs", 'logprobs_mode="processed_logprobs"'),
        ("scheduler_config", "async_scheduling", True, "async_scheduling=False"),
        ("scheduler_config", "enable_chunked_prefill", True, "enable_chunked_prefill=False"),
        ("parallel_config", "world_size", 2, "one worker"),
        ("model_config", "quantization", "fp8", "quantization"),
        ("load_config", "load_format", "dummy", "load_format"),
    ],
)
def test_an_llm_that_would_sample_wrongly_is_refused(
    host: Host, monkeypatch: pytest.MonkeyPatch, section: str, name: str, value: Any, message: str
) -> None:
    monkeypatch.setattr(getattr(host.llm.llm_engine.vllm_config, section), name, value)
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        host.engine()


def test_a_step_without_an_update_keeps_the_llm(host: Host) -> None:
    task, make_engine = TinyTask(reward=lambda rollout: 1.0), lambda _, version: host.engine(version=version)
    loop = RlLoop(host.model, task, make_engine, optim=PLAIN, options=options())
    reports = [loop.step() for _ in range(2)]
    assert [report.update for report in reports] == [None, None]
    assert all(report.engine.num_sampled > 0 for report in reports)


def test_a_call_of_an_episode_names_a_prompt_without_tokens(host: Host) -> None:
    """Its history has whole episodes, so a call's context does not precede them."""
    found = {}
    for call in (None, 0):
        request = replace(sampled(1)[0], call=call)
        params = sampling_params(request, num_tokens=8, vocab_size=64, seed=0, names_prompt=True)
        found[call] = read_request_args(params.extra_args)
    assert [found[call].num_prompt_tokens for call in (None, 0)] == [PROMPT.size, 0]


# Exact verification: drafts change no token. Without it vLLM's CPU build samples wrongly with drafts.
NUM_PROMPTS, GROUP_SIZE = 8, 8


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("history") / "rings"


@pytest.fixture(scope="module")
def drafting(host: Host, history: Path, tmp_path_factory: pytest.TempPathFactory) -> Host:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TREERING_HISTORY", str(history))
        settings = {**drafts(), "per_request_spec_decode_metrics": "summary"}
        return Host(host.model, tmp_path_factory.mktemp("drafting"), **settings)


def drafted(draw: int = 0, **sampling: Any) -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 64, 20 + 7 * i).astype(np.int32) for i in range(NUM_PROMPTS)]
    settings = Sampling(**{"max_tokens": 60, "stop_tokens": (3,), **sampling})
    return [
        Request(prompt_id=f"q{i}", prompt=prompt, sampling=settings, draw=draw, sample=sample)
        for i, prompt in enumerate(prompts)
        for sample in range(GROUP_SIZE)
    ]


def publish(history: Path, rollouts: dict[RolloutKey, Rollout], prompts: dict[Any, Any]) -> None:
    from treering.history.store.store import HistoryStore
    from treering.types import hash_of_prompt

    with HistoryStore(history) as store:
        for (prompt_id, _, _), rollout in rollouts.items():
            store.add(prompt_id, [rollout.tokens], 0)
            store.add(hash_of_prompt(prompts[prompt_id]), [rollout.tokens], 0)
        store.publish()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}], ids=["plain", "cut"])
def test_64_of_64_rollouts_are_those_of_no_drafts(
    host: Host, drafting: Host, history: Path, sampling: dict[str, Any]
) -> None:
    asked = drafted(**sampling)
    expected = run(host.engine(truncated="recompute"), asked)
    publish(history, expected, {request.prompt_id: request.prompt for request in asked})
    engine = drafting.engine(truncated="recompute", verification="exact")
    found = run(engine, asked)
    same = [key for key, rollout in found.items() if rollout.tokens.tolist() == expected[key].tokens.tolist()]
    assert len(same) == len(expected) == 64
    for key, rollout in found.items():
        np.testing.assert_allclose(rollout.logprobs, expected[key].logprobs, atol=2e-5)
        assert rollout.finish_reason == expected[key].finish_reason
        if not sampling:
            prompt = next(request.prompt for request in asked if request.key == key)
            np.testing.assert_allclose(rollout.logprobs, logprobs_of(host.model, prompt, rollout.tokens), atol=2e-5)
    # Drafts were verified, accepted and rejected.
    assert 100 < engine.stats.num_accepted < engine.stats.num_drafted
    assert engine.stats.tokens_per_forward > 1.2


def test_vllm_s_own_verification_is_refused_where_its_build_samples_wrongly(drafting: Host) -> None:
    with pytest.raises(UnsupportedError, match=r"verification=\"rejection\" does not work here.*55005.*set \"exact\""):
        drafting.engine(verification="rejection")


def test_exact_verification_needs_workers_that_answer(drafting: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = drafting.llm.llm_engine.vllm_config.parallel_config
    monkeypatch.setattr(parallel, "worker_extension_cls", "")
    with pytest.raises(ConfigError, match="worker_extension_cls"):
        drafting.engine(verification="exact")


def test_what_the_drafter_learns_comes_back_and_is_where_the_next_engine_begins(drafting: Host) -> None:
    from treering.history.draft.drafter import Drafter
    from treering.history.store.store import HistoryStore

    def same(one: Any, other: Any) -> bool:
        return all(np.array_equal(values, other[name]) for name, values in one.items())

    drafter = Drafter(HistoryStore(), max_draft=K, shape="chain")
    fresh = drafter.state()
    engine = drafting.engine(verification="exact", drafter=drafter)
    run(engine, drafted(draw=2)[:8])
    engine.refresh_history()
    learnt = drafter.state()
    assert not same(learnt, fresh)
    drafting.engine(verification="exact", drafter=drafter).refresh_history()
    assert same(drafter.state(), learnt)


def rehearsed_tokens(engine: Any, asked: list[Request], num_steps: int | None = None) -> dict[RolloutKey, Any]:
    engine.rehearse(asked)
    while engine.is_rehearsing and num_steps != 0:
        assert engine.step() == []
        num_steps = None if num_steps is None else num_steps - 1
    tokens: dict[RolloutKey, Any] = engine.take_rehearsals()
    return tokens


def test_rehearsals_have_a_price_below_that_of_a_token_on_a_gpu_with_exact_verification(
    host: Host, drafting: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, plain = drafting.engine(verification="exact"), host.engine()
    assert exact.row_price == plain.row_price == 1.0
    for engine in (exact, plain):
        monkeypatch.setattr(engine._engine.vllm_config.device_config, "device_type", "cuda")
    assert exact.row_price < 1.0
    assert plain.row_price == 1.0


def test_rehearsed_rollouts_are_those_of_the_new_weights_and_take_fewer_rows(host: Host, drafting: Host) -> None:
    asked = drafted(draw=3)[:MAX_BATCH]
    engine = drafting.engine(verification="exact")
    early = rehearsed_tokens(engine, asked)
    assert engine.stats.num_rehearsed == sum(map(len, early.values())) > 0
    assert (engine.stats.num_rows, engine.stats.num_sampled) == (0, 0)
    disturb(host.model, size=2e-3)
    expected = run(host.engine(version=1), asked)
    engine.update_weights(1)
    before = engine.stats
    found = run(engine, [replace(one, rehearsed=early[one.key]) for one in asked])
    counts = engine.stats.since(before)
    again = run(engine, [replace(one, rehearsed=(early[one.key] + 1) % 64) for one in asked])
    assert [found[key].tokens.tolist() for key in expected] == [own.tokens.tolist() for own in expected.values()]
    assert [again[key].tokens.tolist() for key in expected] == [own.tokens.tolist() for own in expected.values()]
    kept = {key: np.cumprod(_agrees(early[key], own.tokens)).sum() for key, own in expected.items()}
    num_changed = sum(kept[key] < min(early[key].size, own.num_tokens) for key, own in expected.items())
    assert (counts.num_kept, counts.num_changed) == (sum(kept.values()), num_changed)
    # The update changes some rollouts and leaves most tokens.
    assert 0 < num_changed < len(expected)
    assert counts.num_kept > 0.3 * sum(map(len, early.values()))
    # A kept token takes no pass of its own.
    assert counts.num_rows < 0.8 * counts.num_sampled


def _agrees(one: Any, other: Any) -> Any:
    size = min(one.size, other.size)
    return one[:size] == other[:size]


def test_rehearsals_take_free_rows_only_and_keep_what_they_sampled(host: Host, drafting: Host) -> None:
    later, now = drafted(draw=4)[:MAX_BATCH], drafted(draw=5)[: MAX_BATCH - 2]
    expected = run(host.engine(), now)
    engine = drafting.engine(verification="exact")
    engine.rehearse(later)
    for _ in range(3):
        engine.step()
    engine.submit(now)
    found = {}
    while engine.num_unfinished:
        for rollout in engine.step():
            found[rollout.key] = rollout
    assert [found[key].tokens.tolist() for key in expected] == [own.tokens.tolist() for own in expected.values()]
    early = engine.take_rehearsals()
    assert not engine.is_rehearsing
    assert 2 <= sum(tokens.size > 0 for tokens in early.values()) <= MAX_BATCH
    whole = run(host.engine(), later)
    assert all(tokens.tolist() == whole[key].tokens[: tokens.size].tolist() for key, tokens in early.items())


def test_rehearsals_are_refused_as_requests_are(drafting: Host) -> None:
    engine = drafting.engine(verification="exact")
    with pytest.raises(InputError, match="needs max_model_len"):
        engine.rehearse([replace(drafted()[0], sampling=Sampling(max_tokens=MAX_MODEL_LEN))])
    assert not engine.is_rehearsing


def test_rehearsals_are_refused_without_exact_verification(host: Host) -> None:
    with pytest.raises(ConfigError, match=r'verification="exact"'):
        host.engine().rehearse(drafted()[:1])
