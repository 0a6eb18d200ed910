"""Exact verification: drafts change no token. On real vLLM, whose CPU build samples wrongly with drafts otherwise."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.protocol_laws import run
from tests.integrations.vllm.llms import Host, K, build, drafts, logprobs_of
from treering.engine.protocol import Request, Rollout, RolloutKey, Sampling
from treering.errors import ConfigError, UnsupportedError

NUM_PROMPTS, GROUP_SIZE = 8, 8


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Host:
    return Host(build(tied=False), tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("history") / "rings"


@pytest.fixture(scope="module")
def drafting(plain: Host, history: Path, tmp_path_factory: pytest.TempPathFactory) -> Host:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TREERING_HISTORY", str(history))
        settings = {**drafts(), "per_request_spec_decode_metrics": "summary"}
        return Host(plain.model, tmp_path_factory.mktemp("drafting"), **settings)


def requests(draw: int = 0, **sampling: Any) -> list[Request]:
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
    plain: Host, drafting: Host, history: Path, sampling: dict[str, Any]
) -> None:
    asked = requests(**sampling)
    expected = run(plain.engine(truncated="recompute"), asked)
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
            np.testing.assert_allclose(rollout.logprobs, logprobs_of(plain.model, prompt, rollout.tokens), atol=2e-5)
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
    run(engine, requests(draw=2)[:8])
    engine.refresh_history()
    learnt = drafter.state()
    assert not same(learnt, fresh)
    drafting.engine(verification="exact", drafter=drafter).refresh_history()
    assert same(drafter.state(), learnt)
