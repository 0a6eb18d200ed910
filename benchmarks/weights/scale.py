"""What a controller spends on each message and worker, and what that makes of 1 to 1,000 workers in virtual time."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from benchmarks.weights.roles import Answer, SizedRecipe, run_reader
from treering.cli.simulate.cases import make_cases
from treering.cli.simulate.options import SimulateOptions
from treering.runtime.ipc.launcher import Launcher, wait_for_any
from treering.runtime.ipc.process import ChildProcess
from treering.schedule.policies import make_policy
from treering.schedule.simulator.run import simulate

NUM_WORKERS = (1, 10, 100, 1000)
NUM_SLOTS = 16
ROLLOUTS_PER_WORKER = 32
NUM_STEPS = 6

MESSAGES_PER_ROLLOUT = 4
"""Its request, its tokens, the request of its reward, the reward; half of them wake the controller."""

ROLLOUT_BYTES = 125_000
"""5,000 tokens of 25 bytes."""

_NUM_MESSAGES = 200
_NUM_CALLS = 2_000
_NUM_OFFERS = 20
_NUM_CONNECTIONS = 200
_TIME_LIMIT_S = 600.0


def controller_costs(launcher: Launcher) -> dict[str, float]:
    """CPU seconds of the controller: of a rollout's message, of a worker at each wake, of offering it weights."""
    recipe = SizedRecipe(num_tensors=1)
    store = launcher.open(recipe, recipe.make_model(), 2)
    store.write(1, recipe.make_model())
    child = ChildProcess("reader", "rollout_worker", run_reader, launcher, time_limit_s=_TIME_LIMIT_S)
    try:
        child.start(recipe)
        while not child.is_ready:
            wait_for_any([child.connection], 1.0)
            child.receive()
        return {
            "message_s": _cpu_s(lambda: _receive_all(child)) / _NUM_MESSAGES,
            "wake_s": _cpu_s(lambda: [child.receive() for _ in range(_NUM_CALLS)]) / _NUM_CALLS + _wait_s(),
            "offer_s": _cpu_s(lambda: [child.offer(1) for _ in range(_NUM_OFFERS)]) / _NUM_OFFERS,
        }
    finally:
        child.stop()
        store.close()
        launcher.close()


def scaled(num_workers: int, hand_over_s: float, costs: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a step with so many workers on Ray, and how busy the controller is meanwhile.

    Args:
        num_workers: rollout workers.
        hand_over_s: from the trainer's weights to a worker's.
        costs: see `controller_costs`.
    """
    num_rollouts = ROLLOUTS_PER_WORKER * num_workers
    load_s = hand_over_s + num_workers * costs["offer_s"]
    messages_s = num_rollouts * MESSAGES_PER_ROLLOUT * costs["message_s"]
    wakes_s = num_rollouts * (MESSAGES_PER_ROLLOUT / 2) * num_workers * costs["wake_s"]
    return {
        "num_workers": num_workers,
        "num_rollouts": num_rollouts,
        "load_s": load_s,
        "step_s": _step_s(num_workers, load_s),
        "step_without_load_s": _step_s(num_workers, 0.0),
        "messages_s": messages_s,
        "wakes_s": wakes_s,
    }


def _step_s(num_workers: int, load_s: float) -> float:
    options = SimulateOptions(
        num_workers=num_workers,
        num_slots=NUM_SLOTS,
        num_rollouts=ROLLOUTS_PER_WORKER * num_workers,
        num_steps=NUM_STEPS,
        load_s=load_s,
    )
    ((trace, cluster),) = make_cases(options)
    return simulate(make_policy("histopipe"), trace, workers=cluster).makespan_s / NUM_STEPS


def _receive_all(child: ChildProcess) -> None:
    child.send(Answer(num_messages=_NUM_MESSAGES, num_bytes=ROLLOUT_BYTES))
    num_left = _NUM_MESSAGES
    while num_left:
        wait_for_any([child.connection], 1.0)
        num_left -= len(child.receive()[0])


def _wait_s() -> float:
    """Of one more connection that is waited for."""
    with ExitStack() as stack:
        pipes = [os.pipe() for _ in range(_NUM_CONNECTIONS)]
        for end in (end for pipe in pipes for end in pipe):
            stack.callback(os.close, end)
        ends = [_Readable(pipe[0]) for pipe in pipes]
        return _cpu_s(lambda: wait_for_any(ends, 0.0)) / _NUM_CONNECTIONS  # type: ignore[arg-type]


class _Readable:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor


def _cpu_s(call: Callable[[], Any]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started
