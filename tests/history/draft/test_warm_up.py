"""After a warm-up no step compiles anything, and the drafter is unchanged."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from numba.core import event

from tests.history.draft.test_request_drafter import HISTORY, PROMPTS, Engine, Step
from tests.history.reference import Row, draft_rows, same_drafts, store_of
from treering.history.budget import VerifyCosts
from treering.history.draft.drafter import Drafter
from treering.history.draft.request_drafter import RequestDrafter
from treering.history.store.history_reader import HistoryReader
from treering.history.store.store import HistoryStore


class Compiled(event.Listener):
    """Listener that collects the names of functions that numba compiles or loads."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_start(self, event: event.Event) -> None:
        self.names.append(event.data["dispatcher"].py_func.__qualname__)

    def on_end(self, event: event.Event) -> None:
        pass


def run_guest(folder: Path) -> list[str]:
    """Run rows that move, join and leave after a warm-up; return the functions compiled meanwhile."""
    store = HistoryStore(folder)
    reader = HistoryReader(folder)
    guest = RequestDrafter(Drafter(reader, shape="chain", min_acceptance=0.01, max_draft=6))
    guest.warm_up()
    for prompt_id, versions in HISTORY.items():
        store.add(prompt_id, [np.array(rollout, np.int32) for rollout in versions[0]], 0)
    store.publish()
    listener, engine, rng = Compiled(), Engine(0), np.random.default_rng(0)
    event.register("numba:compile", listener)
    for number in range(60):
        engine.sample()
        new = engine.turn_over(Step(*rng.integers(0, (2, 2, 3)).tolist(), swaps=True, prefill=False))
        guest.remove(engine.finished)
        for request in new:
            size = len(PROMPTS[request.prompt_id])
            guest.add(request.name, prompt_id=request.prompt_id, group=request.prompt_id, num_prompt_tokens=size)
        engine.show()
        counts = np.array([len(request.tokens) for request in engine.lines], np.int32)
        lists = guest.propose([r.name for r in engine.lines], engine.tokens, counts, np.full(counts.size, 6))
        for request, draft in zip(engine.lines, lists, strict=True):
            request.draft = draft
        if number == 20:
            reader.refresh()
        if number == 40:
            guest.drafter.use_costs(VerifyCosts(num_tokens=[1, 64], seconds=[1e-3, 3e-3]))
    assert guest.num_accepted > 0
    store.close()
    return listener.names


def test_no_step_compiles_anything_after_a_warm_up(tmp_path: Path) -> None:
    # Use a new process: in this one other tests have compiled everything.
    code = (
        "import sys; from pathlib import Path; from tests.history.draft.test_warm_up import run_guest; "
        "print(run_guest(Path(sys.argv[1])))"
    )
    root = Path(__file__).parents[3]
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=root, capture_output=True, text=True, timeout=500
    )
    assert (run.stdout.strip(), run.returncode) == ("[]", 0), run.stderr


def test_a_warm_up_changes_no_draft() -> None:
    history = {"q": {0: [[1, 2, 3, 4]] * 2}}
    warm, plain = Drafter(store_of(history)), Drafter(store_of(history))
    warm.warm_up()
    rows = draft_rows([Row(rollout=(1,))])
    drafts = warm.propose(rows)
    assert same_drafts(drafts, plain.propose(rows))
    # Warm up between propose and observe too.
    warm.warm_up()
    for drafter in (warm, plain):
        drafter.observe(rows, np.array([1]))
    for name, values in plain.state().items():
        np.testing.assert_array_equal(warm.state()[name], values, strict=True)
