"""The process that replays Arctic's drafter, with a stand-in for Arctic that drafts by rules a test can follow."""

import json
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.draft.drafters.arctic import PYTHON, ArcticConfig, is_installed, replay_arctic
from benchmarks.draft.histories import Plan, plans

from tests.benchmarks.draft.recordings import recording
from treering.analysis.recording import Recorded

STAND_IN = '''
import json, os
from types import SimpleNamespace

class SuffixDecodingCache:
    """Drafts what follows the last token in the cached response of the largest number, and notes what it held."""

    num_made = 0

    def __init__(self, max_tree_depth, max_cached_requests):
        self.depth, self.held, self.active = max_tree_depth, {}, {}
        SuffixDecodingCache.num_made += 1
        self.name = SuffixDecodingCache.num_made
        self._global_tree = SimpleNamespace(estimate_memory=lambda: 7 * sum(map(len, self.held.values())))

    @property
    def cached_requests(self):
        return self.held.keys()

    def start_request(self, number, prompt):
        assert number not in self.held
        self.active[number], self.held[number] = list(prompt), []

    def add_active_response(self, number, tokens):
        self.active[number] += list(tokens)
        self.held[number] += list(tokens)

    def stop_request(self, number):
        del self.active[number]

    def evict_cached_response(self, number):
        del self.held[number]

    def speculate(self, number, context, max_spec_tokens, max_spec_factor, min_token_prob, use_tree_spec):
        assert len(context) <= self.depth
        assert list(context) == [int(token) for token in self.active[number]][-self.depth:]
        with open(os.environ["NOTES"], "a") as notes:
            others = {other: len(tokens) for other, tokens in sorted(self.held.items()) if other != number}
            print(json.dumps([number, list(others), self.name, list(others.values())]), file=notes)
        if not len(context):
            return SimpleNamespace(token_ids=[], parents=[])
        others = [other for other in sorted(self.held) if other != number and context[-1] in self.held[other]]
        if not others:
            return SimpleNamespace(token_ids=[], parents=[])
        text = [int(token) for token in self.held[others[-1]]]
        at = text.index(context[-1]) + 1
        tokens = text[at : at + max_spec_tokens]
        if use_tree_spec:
            return SimpleNamespace(token_ids=[99] + tokens, parents=[-1, -1] + list(range(1, len(tokens))))
        return SimpleNamespace(token_ids=tokens, parents=list(range(-1, len(tokens) - 1)))
'''


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `python` that finds the stand-in although it is started in isolation."""
    package = tmp_path / "site" / "arctic_inference"
    (package / "suffix_decoding").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "suffix_decoding" / "__init__.py").write_text(STAND_IN)
    facts = tmp_path / "site" / "arctic_inference-0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: arctic_inference\nVersion: 0\n")
    script = tmp_path / "env" / "bin" / "python"
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/sh\nshift\nPYTHONPATH="{package.parent}" exec "{sys.executable}" "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return script


def config(*, scope: str = "per_prompt", draft: str = "path", size: int = 2, depth: int = 4) -> ArcticConfig:
    return ArcticConfig(scope=scope, draft=draft, depth=depth, max_spec_tokens=size, max_spec_factor=1.0)  # type: ignore[arg-type]


def notes(tmp_path: Path) -> list[tuple[int, list[int], int, list[int]]]:
    """Return by step: the rollout, the cache's other contents, the cache's number, and how much of each it held."""
    return [tuple(json.loads(line)) for line in (tmp_path / "notes").read_text().splitlines()]  # type: ignore[misc]


def held(tmp_path: Path) -> dict[int, list[int]]:
    """Return by rollout the other contents of its cache, which are the same at all of its steps."""
    found = {number: own for number, own, *_ in notes(tmp_path)}
    assert all(own == found[number] for number, own, *_ in notes(tmp_path))
    return found


def samples() -> Recorded:
    tasks = ["a", "a", "b", "b", "a"]
    return recording([(task, [50 + i, 1, 2, 3, 4, 5], "011011") for i, task in enumerate(tasks)])


def replay(found: Recorded, plan: Plan, settings: list[ArcticConfig], python: Path) -> list[dict[str, Any]]:
    return replay_arctic(found, plan, settings, lambda done: None, python)


def test_drafts_are_counted_within_the_sampled_run(python: Path) -> None:
    found = recording([("a", [0, 1, 2, 3, 4, 5], "011011"), ("a", [0, 1, 2, 3, 4, 5], "011011")])
    plan = plans(found)["siblings"]
    for settings, drafted in ((config(), 2 + 2), (config(draft="tree"), 3 + 3)):
        (row,) = replay(found, plan, [settings], python)
        assert row["config"]["draft"] == settings.draft
        # The first rollout has no history and takes 4 steps. The second takes 3: after 0, which no response contains,
        # it drafts nothing; after 1 it drafts 2 3, and 2 is right; after 3 it drafts 4 5.
        assert row["tokens_per_step"] == pytest.approx(8 / 7)
        assert row["drafted_per_step"] == pytest.approx(drafted / 7)
        assert row["precision"] == pytest.approx(3 / drafted)
        assert row["bytes_per_token"] == pytest.approx(7.0)
        assert 0 < row["us_per_row"] <= row["us_per_row_p95"]
        assert row["append_us_per_token"] > 0


def test_each_tasks_cache_holds_the_sources_of_each_rollout(python: Path, tmp_path: Path) -> None:
    found = samples()
    for history in ("siblings", "wrong_task", "none"):
        (tmp_path / "notes").unlink(missing_ok=True)
        plan = plans(found)[history]  # type: ignore[index]
        (row,) = replay(found, plan, [config()], python)
        expected = {int(rollout): plan.sources(number).tolist() for number, rollout in enumerate(plan.order)}
        assert held(tmp_path) == expected
        names = {number: name for number, _, name, _ in notes(tmp_path)}
        assert names[0] == names[1] == names[4] != names[2] == names[3]
        # The final size: the stand-in counts its tokens, seven bytes each.
        assert row["bytes_per_token"] == (0 if history == "none" else 7)


def test_the_real_one_finds_what_a_sibling_wrote() -> None:
    if not is_installed():
        pytest.skip("Arctic is not installed; `make peers` installs it")
    found = recording([("a", [7, *range(100, 140)], "0" + "1" * 40)] * 2)
    best = [config(size=16, depth=24), config(size=16, depth=24, draft="tree")]
    for row in replay(found, plans(found)["siblings"], best, PYTHON):
        assert row["tokens_per_step"] > 3
        assert row["version"] == "0.3.0"
    for row in replay(found, plans(found)["none"], best, PYTHON):
        assert row["tokens_per_step"] == 1.0
    assert np.isfinite(row["us_per_row"])
