"""The same calls give the same drafts: repeated, in another thread, and after a checkpoint.

Saved state is validated.
"""

import ast
import importlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import numpy as np
import pytest
from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher

from tests.history.draft.test_acceptance import ROW, drafter_of, observe
from tests.history.reference import (
    Row,
    draft_rows,
    likeliest_path,
    same_drafts,
    store_of,
)
from treering import history
from treering.errors import InputError, StateError
from treering.history.draft.drafter import Drafter
from treering.history.jit import stamp_of
from treering.history.store.store import HistoryStore

PACKAGE = list(history.__path__)


def test_cached_functions_are_named_by_all_sources_that_they_may_use(tmp_path: Any) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "b.py").write_text("y = 1")
    before = stamp_of(tmp_path)
    (tmp_path / "a.py").write_text("x = 2")
    assert stamp_of(tmp_path) != before


def cached_functions() -> Iterator[tuple[str, Any]]:
    """Yield the package's cached compiled functions with their modules."""
    names = sorted(module.name for module in walk_packages(PACKAGE, "treering.history."))
    for module in map(importlib.import_module, names):
        for value in vars(module).values():
            is_cached = isinstance(value, Dispatcher) and not isinstance(value._cache, NullCache)
            if is_cached and value.py_func.__module__ == module.__name__:
                yield module.__name__, value


def foreign_names(module_name: str, function: Any) -> set[str]:
    """Return the names that a compiled function and its callees in the same module take from other history modules."""
    module = importlib.import_module(module_name)
    seen: set[str] = set()
    waiting, found = [function.py_func], set()
    while waiting:
        for name in waiting.pop().__code__.co_names:
            value = getattr(module, name, None)
            if name in seen or value is None:
                continue
            seen.add(name)
            code = getattr(value, "py_func", value)
            home = getattr(code, "__module__", None)
            if isinstance(value, Dispatcher) and home == module_name:
                waiting.append(code)
            elif name in imported_names(module):
                found.add(name)
    return found


def imported_names(module: Any) -> set[str]:
    """Return the names that a module imports from other history modules."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    taken = [index for index in ast.walk(tree) if isinstance(index, ast.ImportFrom)]
    return {name.name for index in taken if str(index.module).startswith("treering.history") for name in index.names}


def test_every_cached_function_that_uses_other_files_is_named_by_them() -> None:
    stamped = []
    for module_name, function in cached_functions():
        # MARKER is part of the file format, so it never changes.
        if foreign_names(module_name, function) - {"MARKER"}:
            assert function._cache.stamp == stamp_of(Path(PACKAGE[0])), function
            stamped.append(function.__name__)
    assert sorted(stamped) == ["learn", "mark", "propose"]


def run_of(store: HistoryStore, seed: int, num_steps: int = 30) -> list[Any]:
    """Return a drafter's outputs for rollouts that grow by accepted drafts and one random token per step."""
    rng, drafter = np.random.default_rng(seed), Drafter(store, min_acceptance=0.02)
    rows, given_out = [Row(group=b // 2) for b in range(6)], []
    for _ in range(num_steps):
        batch = draft_rows(rows, row_ids=list(range(6)))
        drafts = drafter.propose(batch)
        given_out.append(drafts)
        paths = [likeliest_path(drafts, b) for b in range(6)]
        counts = np.array([rng.integers(0, len(path) + 1) for path in paths], np.int64)
        drafter.observe(batch, counts, None, counts - 1)
        rows = [
            replace(row, rollout=(*row.rollout, *path[:n], int(rng.integers(1, 5))))
            for row, path, n in zip(rows, paths, counts, strict=True)
        ]
    return given_out


def test_drafters_in_two_threads_give_the_drafts_of_separate_runs() -> None:
    rng = np.random.default_rng(3)
    store = store_of({"q": {v: [rng.integers(1, 5, 40).tolist() for _ in range(3)] for v in range(2)}})
    alone = [run_of(store, seed) for seed in range(2)]
    together: list[list[Any]] = [[], []]

    def work(seed: int) -> None:
        together[seed] = run_of(store, seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(drafts.tokens.size for drafts in alone[0]) > 100
    for mine, theirs in zip(alone, together, strict=True):
        assert all(same_drafts(a, b) for a, b in zip(mine, theirs, strict=True))


def test_loading_a_state_forgets_earlier_proposals() -> None:
    drafter = drafter_of()
    rows = draft_rows([ROW])
    drafter.propose(rows)
    drafter.load_state(drafter.state())
    with pytest.raises(StateError, match="propose first"):
        drafter.observe(rows, np.array([1]))


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("squares"),
        lambda state: state.update(weights=np.zeros(3)),
        lambda state: state.update(squares=state["squares"] - 1e9),
        lambda state: state.update(weights=state["weights"] * np.nan),
        lambda state: state.update(weights=np.full(state["weights"].size, 2e6)),
        lambda state: state.update(squares=0 * state["squares"]),
        lambda state: state.update(num_undrafted=np.array([-1])),
    ],
)
def test_another_state_is_refused_and_nothing_is_taken(change: Callable[[dict[str, Any]], object]) -> None:
    drafter = drafter_of()
    for _ in range(3):
        observe(drafter, (2, 3, 4))
    before = drafter.state()
    state = {name: values + 1 for name, values in before.items()}
    change(state)
    with np.errstate(invalid="ignore"), pytest.raises(InputError, match=r"pass a state\(\) unchanged"):
        drafter.load_state(state)
    assert all((drafter.state()[name] == values).all() for name, values in before.items())


@pytest.mark.parametrize("draw", range(4))
def test_the_largest_weights_leave_estimates_probabilities(draw: int) -> None:
    drafter = drafter_of()
    state = drafter.state()
    state["weights"][:] = np.random.default_rng(draw).choice([-1e6, 1e6], state["weights"].size)
    drafter.load_state(state)
    for _ in range(8):
        assert all(0 < estimate < 1 for estimate in observe(drafter, (2, 3, 4)))
    assert np.isfinite(drafter.state()["weights"]).all()


def test_a_state_is_a_copy() -> None:
    drafter = drafter_of()
    state = drafter.state()
    observe(drafter, (2, 3, 4))
    assert not state["reliability"].any()
    drafter.load_state(state)
    state["reliability"][:] = 5
    assert not drafter.state()["reliability"].any()
