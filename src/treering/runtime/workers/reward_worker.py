"""The reward worker: runs rewards and observations, which are user code, in their own process.

It has no time limit of its own: the controller kills it.
"""

import sys

from treering.rl.judging import judge
from treering.runtime.ipc.child import Port, Ready
from treering.runtime.ipc.messages import Cases, Judged, JudgeSettings
from treering.runtime.ipc.shared_memory import SharedMemory


def run_reward_worker(port: Port, _: SharedMemory, settings: JudgeSettings) -> None:
    """The role of the judge."""
    task = settings.recipe.make_task()
    prompts = {prompt.prompt_id: prompt for prompt in task.prompts}
    port.send(Ready())
    while True:
        cases: Cases = port.take()
        for case in cases.cases:
            rollout, prompt = case.rollout, prompts[case.rollout.prompt_id]
            verdict = judge(task, prompt, rollout, is_last_turn=case.is_last_turn, max_tokens=settings.max_tokens)
            # What rewards print would be lost with a process that is ended from outside.
            sys.stdout.flush()
            port.send(Judged(key=rollout.key, verdict=verdict))
