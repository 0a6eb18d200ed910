"""The names that code outside the repository calls: each exists, is listed, and is the object of its home module."""

from importlib import import_module
from pathlib import Path

import pytest

import treering
import treering.objectives
import treering.schedule
import treering.train.objectives

HOMES = {
    "Forest": "treering.tree.forest",
    "tree_attention": "treering.model.context",
    "forward": "treering.model.forward",
    "patch": "treering.model.patch",
    "per_token_logps": "treering.model.forward",
    "score": "treering.model.teacher",
    "backward": "treering.train.step",
    "tree_advantages": "treering.rl.advantages",
    "HistoryReader": "treering.history.store.history_reader",
    "HistoryStore": "treering.history.store.store",
    "Drafter": "treering.history.draft.drafter",
    "DraftRows": "treering.history.draft.drafter",
    "RequestDrafter": "treering.history.draft.request_drafter",
    "TorchEngine": "treering.engine.torch_engine",
    "TreeModel": "treering.model.tree_model",
    "Request": "treering.engine.protocol",
    "Sampling": "treering.config.engine",
    "Rollout": "treering.engine.protocol",
    "RouterLosses": "treering.config.steps",
}
SCHEDULE = {
    "Cluster": "cluster",
    "Forecast": "policy",
    "HistoPipe": "histopipe",
    "Latency": "cluster",
    "AssignmentRequest": "policy",
    "Timeline": "simulator",
    "Trace": "traces",
    "TraceStep": "traces",
    "linear_latency": "cluster",
    "make_policy": "histopipe",
    "read_trace": "traces",
    "simulate": "simulator",
    "synthetic_trace": "traces",
}
OBJECTIVES = {file.stem for file in Path(treering.train.objectives.__path__[0]).glob("[!_]*.py")}
FOR_OWN = {"Entries", "Objective", "Terms", "policy_objective"}


def test_the_public_names_are_exactly_these() -> None:
    assert set(treering.__all__) == {*HOMES, "errors", "families", "objectives", "ranks", "schedule", "__version__"}
    assert set(treering.objectives.__all__) == OBJECTIVES | {
        "Entries",
        "Objective",
        "Terms",
        "policy_objective",
        "register",
    }
    assert set(treering.schedule.__all__) == set(SCHEDULE)


def test_a_public_name_is_the_object_of_its_home() -> None:
    for name, home in HOMES.items():
        assert getattr(treering, name) is getattr(import_module(home), name)
    for name, home in SCHEDULE.items():
        assert getattr(treering.schedule, name) is getattr(import_module(f"treering.schedule.{home}"), name)
    for name in OBJECTIVES:
        assert getattr(treering.objectives, name) is getattr(import_module(f"treering.train.objectives.{name}"), name)


def test_dir_lists_every_public_name_before_its_first_use() -> None:
    assert set(treering.__all__) <= set(dir(treering))
    assert set(dir(treering.objectives)) >= OBJECTIVES
    assert set(dir(treering.schedule)) >= set(SCHEDULE)


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'forrest'.*Forest"):
        _ = treering.forrest
    with pytest.raises(AttributeError, match=r"no objective 'stf'.*sft"):
        _ = treering.objectives.stf
    with pytest.raises(AttributeError, match=r"no attribute 'histpipe'.*HistoPipe"):
        _ = treering.schedule.histpipe


def test_the_version_is_a_version() -> None:
    assert treering.__version__[0].isdigit()
    assert treering.__version__.count(".") >= 2


def test_every_error_is_also_one_of_the_standard_library() -> None:
    standard = {"InputError": ValueError, "ConfigError": ValueError, "StateError": RuntimeError}
    standard |= {"MissingExtraError": ImportError}
    for name, parent in {**standard, "UnsupportedError": NotImplementedError}.items():
        error = getattr(treering.errors, name)
        assert issubclass(error, treering.errors.TreeringError)
        assert issubclass(error, parent)
