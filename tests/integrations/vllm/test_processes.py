"""An engine in its own processes, as vLLM starts it, gets the drafter through the package's entry point."""

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.servers import ROOT, plugins
from treering.history.store.store import HistoryStore
from treering.integrations.vllm import record, request_args

pytestmark = pytest.mark.filterwarnings("ignore")


def test_an_engine_in_its_own_processes_drafts_with_identity(
    plain_llm: Any, without_clock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.integrations.vllm import in_process as helpers
    from tests.integrations.vllm.llms import build, make_llm

    contexts, greedy = helpers.prompts(8), helpers.sampling(60)
    expected = helpers.generate(plain_llm, contexts, greedy)
    names = [f"q{i % 4}" for i in range(8)]
    with HistoryStore(tmp_path / "history") as store:
        record(store, expected, version=0, prompt_ids=names)
        store.publish()
    plugins(tmp_path / "plugins")
    # A spawned process inherits the import paths of this one.
    for path in (ROOT, ROOT / "src", tmp_path / "plugins"):
        monkeypatch.syspath_prepend(path)
    monkeypatch.setenv("TREERING_HISTORY", str(tmp_path / "history"))
    monkeypatch.setenv("TREERING_VLLM_CONFIG", str(without_clock))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    llm = make_llm(build(tied=False), tmp_path / "model", **helpers.drafts())
    params = [helpers.sampling(60, extra_args=request_args(name, 1)) for name in names]
    assert helpers.tokens_of(helpers.generate(llm, contexts, params)) == helpers.tokens_of(expected)
    stats = helpers.stats_of(llm)
    assert stats["has_identity"]
    assert (stats["num_prompts"], stats["num_failures"]) == (4, 0)
    assert stats["num_accepted"] > 0.7 * 8 * 60
