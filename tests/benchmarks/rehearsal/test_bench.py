"""The chance of a change: counted on a policy whose updates are known, and its table."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
from benchmarks.rehearsal import bench
from benchmarks.rehearsal.change import RATES, Drawn, Policy, facts_of

from tests.models import build_float64
from treering.engine.protocol import EngineStats, Request, Sampling
from treering.engine.torch_engine import TorchEngine

SAMPLING = Sampling(max_tokens=24)
REQUESTS = [Request(prompt_id="q", prompt=[3, 5, 7], sampling=SAMPLING, draw=4, sample=i) for i in range(6)]


def policy() -> Any:
    """Return what `Policy.draw_again` uses of a policy: an engine."""
    return SimpleNamespace(engine=TorchEngine(build_float64().eval(), max_batch=8, max_prefill=8192))


def test_the_same_weights_keep_every_token() -> None:
    own = policy()
    tokens = [rollout.tokens for rollout in sorted(own.engine.generate(REQUESTS), key=lambda each: each.sample)]
    found = Policy.draw_again(own, REQUESTS, tokens)
    # The last token of a rollout is sampled as always, after the others were drawn again.
    assert (found.num_kept, found.num_changed, found.num_tokens) == (6 * 23, 0, 6 * 24)
    assert own.engine.num_unfinished == 0


def test_a_changed_token_is_counted_once_and_ends_what_is_kept() -> None:
    own = policy()
    tokens = [rollout.tokens.copy() for rollout in sorted(own.engine.generate(REQUESTS), key=lambda each: each.sample)]
    for i, each in enumerate(tokens):
        each[3 * i] = (each[3 * i] + 1) % 8
    found = Policy.draw_again(own, REQUESTS, tokens)
    assert (found.num_kept, found.num_changed) == (sum(3 * i for i in range(6)), 6)


def test_the_chance_of_a_change_is_over_tokens_whose_past_stayed() -> None:
    found = facts_of(
        [Drawn(num_kept=90, num_changed=6, num_tokens=200), Drawn(num_kept=10, num_changed=4, num_tokens=50)]
    )
    assert found["change"] == 10 / 110
    assert found["kept_share"] == 100 / 250
    half = found["half_kept_tokens"]
    # At this length half of the tokens are kept.
    assert (1 - np.exp(-found["change"] * half)) / (found["change"] * half) == pytest.approx(0.5, abs=1e-3)
    assert facts_of([Drawn(num_kept=5, num_changed=0, num_tokens=5)])["half_kept_tokens"] == 0.0


def test_every_rate_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "fetched", lambda *_: tmp_path)
    monkeypatch.setattr(bench.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: build_float64())
    made = create_autospec(Policy)
    monkeypatch.setattr(bench, "Policy", made)
    monkeypatch.setattr(bench, "of_rate", lambda _policy: {"one_update_later": {}})
    for _ in range(2):
        report = bench.measure(only=("change",), folder=tmp_path)
        assert [(row["trained"], row["rate"]) for row in report["change"]] == list(RATES)
    assert made.call_count == len(RATES)


def test_passes_with_rehearsals_are_compared_with_those_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = {"off": 50, "auto": 40, "on": 51}

    def run(folder: Path, model: Path, settings: list[str], **_: Any) -> list[Any]:
        mode = settings[0].removeprefix("rl.rehearse=")
        stats = EngineStats(num_forwards=passes[mode], num_rehearsed=9, num_verified=8, num_kept=2)
        return [SimpleNamespace(engine=stats)] * 2

    monkeypatch.setattr(bench, "_run", run)
    rows = bench.harmless(tmp_path, tmp_path, seed=0, on_progress=lambda *_: None)
    assert [row["ratio"] for row in rows] == [1.0, 0.8, 1.02] * len(bench.HARMLESS)
    assert {(row["kept_share"], row["num_forwards"]) for row in rows} == {(0.25, 2 * each) for each in passes.values()}
