"""Actors that may be on other hosts draft from the history that they are sent."""

from tests.integrations.ray.conftest import make_launcher
from tests.runtime import tasks
from tests.runtime.runs import TinyRecipe, pipeline
from tests.runtime.test_history import GREEDY, NUM_STEPS, PER_EPOCH, drafting, drafts_of, run
from treering.runtime.ipc.launcher import Launcher
from treering.runtime.pipeline import PipelineLoop


def test_actors_draft_what_local_processes_draft(ray_here: None, address: str) -> None:
    def loop(launcher: Launcher | None) -> PipelineLoop:
        recipe = TinyRecipe(task=tasks.Constant)
        return pipeline(recipe, num_steps=NUM_STEPS, drafting=drafting(), launcher=launcher, sampling=GREEDY)

    remote = make_launcher(listen=address)
    assert not remote.shares_host
    local_engines, local_rows = run(loop(None))
    engines, rows = run(loop(remote))
    assert rows == local_rows
    assert drafts_of(engines) == drafts_of(local_engines)
    assert sum(engine.num_accepted for engine in engines[PER_EPOCH:]) > 0
