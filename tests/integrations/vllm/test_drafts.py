"""Drafts inside vLLM change no greedy token and no distribution, whatever history holds and the scheduler does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.history.stores import data_files
from tests.integrations.vllm.llms import z_of
from treering.history.store.store import HistoryStore
from treering.integrations.vllm import record

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def helpers() -> Any:
    from tests.integrations.vllm import in_process

    return in_process


def greedy(helpers: Any, llm: Any, **settings: Any) -> list[list[int]]:
    found: list[list[int]] = helpers.tokens_of(
        helpers.generate(llm, helpers.prompts(24), helpers.sampling(60, **settings))
    )
    return found


@pytest.fixture(scope="module")
def expected(plain_llm: Any) -> list[list[int]]:
    from tests.integrations.vllm import in_process

    return greedy(in_process, plain_llm)


def test_greedy_tokens_are_the_same_with_missing_empty_good_and_damaged_history(
    helpers: Any, drafting_llm: Any, plain_llm: Any, history_folder: Path, expected: list[list[int]]
) -> None:
    refresh = lambda: drafting_llm.collective_rpc("treering_refresh")[0]  # noqa: E731
    assert not history_folder.exists()
    assert greedy(helpers, drafting_llm) == expected
    with HistoryStore(history_folder) as store:
        store.publish()
        refresh()
        assert greedy(helpers, drafting_llm) == expected
        before = helpers.stats_of(drafting_llm)
        record(store, helpers.generate(plain_llm, helpers.prompts(24), helpers.sampling(60)), version=0)
        store.publish()
        assert refresh()
        assert greedy(helpers, drafting_llm) == expected
        good = helpers.stats_of(drafting_llm)
        assert good["num_prompts"] == 12
        # The policy repeats the drafted tokens.
        assert good["num_accepted"] - before["num_accepted"] > 0.7 * 24 * 60
        assert good["num_accepted"] - before["num_accepted"] > 0.8 * (good["num_drafted"] - before["num_drafted"])
        store.add("more", [np.arange(9, dtype=np.int32)], version=1)
        store.publish()
    # Publishing would rewrite damaged files, because the store has them in memory.
    for file in data_files(history_folder):
        file.write_bytes(b"garbage" + file.read_bytes()[7:])
    refresh()
    assert greedy(helpers, drafting_llm) == expected
    assert helpers.stats_of(drafting_llm)["num_failures"] == 0


def test_greedy_tokens_are_the_same_without_request_identity(
    helpers: Any, drafting_llm: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = helpers.runner_of(drafting_llm).drafter
    monkeypatch.setattr(drafter, "begin_step", lambda *_: None)
    before = helpers.stats_of(drafting_llm)
    assert greedy(helpers, drafting_llm) == expected
    after = helpers.stats_of(drafting_llm)
    assert not after["has_identity"]
    assert after["num_failures"] == 0
    assert after["num_accepted"] > before["num_accepted"]


def test_rows_near_the_longest_length_are_drafted_for_and_stop_no_other_row(
    helpers: Any, drafting_llm: Any, plain_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without its own limit, each rollout continues to the model's greatest length.
    contexts = [tokens[: 2 + 5 * i] * 1 for i, tokens in enumerate(helpers.prompts(16, size=100))]
    runner, limits = helpers.runner_of(drafting_llm), []
    original = runner.drafter.propose

    def propose(sampled: Any, num_tokens: Any, *args: Any, **kwargs: Any) -> Any:
        lists = original(sampled, num_tokens, *args, **kwargs)
        limits.extend(zip(num_tokens[: len(lists)].tolist(), map(len, lists), strict=True))
        return lists

    num_steps, sample = [0], runner.sample_tokens
    monkeypatch.setattr(runner.drafter, "propose", propose)
    monkeypatch.setattr(runner, "sample_tokens", lambda *a: num_steps.__setitem__(0, num_steps[0] + 1) or sample(*a))
    before = helpers.stats_of(drafting_llm)["num_steps"]
    params = helpers.sampling(None)
    found = helpers.tokens_of(helpers.generate(drafting_llm, contexts, params))
    assert found == helpers.tokens_of(helpers.generate(plain_llm, contexts, params))
    assert {len(context) + len(tokens) for context, tokens in zip(contexts, found, strict=True)} == {
        helpers.MAX_MODEL_LEN
    }
    # vLLM by itself skips the drafter while any row is within K of the limit.
    assert helpers.stats_of(drafting_llm)["num_steps"] - before == num_steps[0]
    assert all(size + num < helpers.MAX_MODEL_LEN or num == 0 for size, num in limits)
    assert any(size > helpers.MAX_MODEL_LEN - helpers.K and num > 0 for size, num in limits)


def test_greedy_tokens_are_the_same_with_preemptions_chunked_prefill_and_prefix_hits(
    helpers: Any, tight_llm: Any, plain_llm: Any, history_folder: Path, expected: list[list[int]]
) -> None:
    llm = tight_llm
    assert greedy(helpers, llm) == expected
    # Again, with prefixes that are cached, and long common prompts.
    assert greedy(helpers, llm) == expected
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    assert counts["vllm:num_preemptions"] > 0
    assert counts["vllm:prefix_cache_hits"] > 0
    stats = helpers.stats_of(llm)
    assert stats["num_failures"] == 0
    assert stats["num_accepted"] > 100
    with HistoryStore(history_folder) as store:
        record(store, helpers.generate(plain_llm, helpers.prompts(24), helpers.sampling(60)), version=2)
        store.publish()
    llm.collective_rpc("treering_refresh")
    assert greedy(helpers, llm) == expected
    assert helpers.stats_of(llm)["num_accepted"] - stats["num_accepted"] > 0.7 * 24 * 60


def test_new_weights_give_their_own_tokens_whatever_the_old_ones_left_in_history(
    helpers: Any, drafting_llm: Any, plain_llm: Any, history_folder: Path, expected: list[list[int]]
) -> None:
    from tests.integrations.vllm.llms import build, disturb

    def load(weights: Any) -> None:
        for llm in (plain_llm, drafting_llm):
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(list(weights.items()))})
            llm.reset_prefix_cache()

    model = build(tied=False)
    first = {name: weight.clone() for name, weight in model.state_dict().items()}
    disturb(model)
    try:
        load(model.state_dict())
        new = greedy(helpers, plain_llm)
        assert sum(one != other for one, other in zip(new, expected, strict=True)) > 12
        assert greedy(helpers, drafting_llm) == new
    finally:
        load(first)
    assert greedy(helpers, drafting_llm) == expected


def truncated(logits: torch.Tensor) -> torch.Tensor:
    """Return logits at temperature 0.7 of the 20 likeliest tokens, then of the fewest with 0.9 of the mass."""
    scaled = logits / 0.7
    scaled = scaled.masked_fill(scaled < scaled.topk(20, -1).values[..., -1:], -torch.inf)
    p, order = scaled.softmax(-1).sort(-1, descending=True)
    is_out = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, p.cumsum(-1) - p >= 0.9)
    return scaled.masked_fill(is_out, -torch.inf)


@pytest.fixture(scope="module")
def hf_model(model_folder: Path) -> torch.nn.Module:
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(model_folder, dtype=torch.float32).double()


def sampled(helpers: Any, llm: Any, **settings: Any) -> tuple[list[list[int]], list[list[int]], int]:
    """420 prompts and rollouts of 50 tokens, and the number of drafted tokens."""
    contexts = helpers.prompts(420, size=10, seed=9)
    before = helpers.stats_of(llm)
    outputs = helpers.generate(llm, contexts, [helpers.sampling(50, **settings) for _ in contexts])
    after = helpers.stats_of(llm)
    return contexts, helpers.tokens_of(outputs), after["num_accepted"] - before["num_accepted"]


@pytest.mark.parametrize(
    ("settings", "cut"),
    [({"temperature": 1.0}, lambda logits: logits), ({"temperature": 0.7, "top_k": 20, "top_p": 0.9}, truncated)],
    ids=["temperature 1", "truncated"],
)
def test_drafts_leave_the_sampled_distribution_as_it_is(
    helpers: Any, drafting_llm: Any, hf_model: torch.nn.Module, settings: dict[str, Any], cut: Any
) -> None:
    from tests.integrations.vllm.shim import right_sampling

    with right_sampling():
        contexts, rollouts, num_accepted = sampled(helpers, drafting_llm, **settings)
    assert sum(map(len, rollouts)) >= 20_000
    assert num_accepted > 100
    assert abs(z_of(hf_model, contexts, rollouts, cut)) < 4
