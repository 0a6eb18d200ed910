"""The plugin does nothing without the opt-in, and never lets verl train with another engine by mistake."""

import json
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec

import pytest

from tests.integrations.verl.common import ROOT, environment
from treering.integrations.verl import verl_plugin

SHOW = """
import json, sys
before = set(sys.modules)
import verl
loaded = sorted(name for name in sys.modules if name.startswith("treering"))
import verl.workers.engine as engine
from verl.workers.engine_workers import ActorRolloutRefWorker
print(json.dumps({
    "loaded": loaded,
    "engines": {f"{model}/{backend}": {str(key): kind.__name__ for key, kind in kinds.items()}
                for model, backends in engine.EngineRegistry._engines.items() for backend, kinds in backends.items()},
    "chosen": engine.EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__,
    "critic": engine.EngineRegistry.get_engine_cls("value_model", "fsdp2").__name__,
    "worker": ActorRolloutRefWorker.actor_worker_cls.__name__,
}))
"""
needs_verl = pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed: make verl-test")


def test_only_its_own_vendor_opts_in() -> None:
    assert verl_plugin.is_chosen({"VERL_ENGINE_VENDOR": "treering"})
    assert not verl_plugin.is_chosen({})
    assert not verl_plugin.is_chosen({"VERL_ENGINE_VENDOR": "nvidia"})


def test_an_engine_that_cannot_be_imported_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl.workers.engine", None)
    with pytest.raises(SystemExit, match=r"asks for Treering's engine, which cannot be imported"):
        verl_plugin.register()


def shown(**chosen: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHOW],
        cwd=ROOT,
        env=environment(**chosen),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


@needs_verl
@pytest.mark.slow
def test_without_the_opt_in_nothing_of_verl_changes() -> None:
    assert "treering" in {point.name for point in entry_points(group="verl.plugins")}
    without, stock = shown(), shown(VERL_USE_EXTERNAL_PLUGINS="none")
    assert stock["loaded"] == []
    assert not {name for name in without["loaded"] if "integrations.verl." in name} - {verl_plugin.__name__}
    assert {name: value for name, value in without.items() if name != "loaded"} == {
        name: value for name, value in stock.items() if name != "loaded"
    }
    assert (without["chosen"], without["worker"]) == ("FSDPEngineWithLMHead", "TrainingWorker")


@needs_verl
@pytest.mark.slow
def test_with_the_opt_in_language_models_train_on_trees_and_critics_stay() -> None:
    chosen = shown(VERL_ENGINE_VENDOR="treering", TREERING_VERL_GROUPS="whole_mini_batches")
    assert (chosen["chosen"], chosen["critic"]) == ("TreeEngine", "FSDPEngineWithValueHead")
    assert chosen["worker"] == "GroupedWorker"
