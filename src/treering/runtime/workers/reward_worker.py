"""The reward worker: runs rewards, which are user code, in their own process.

It has no time limit of its own: the controller kills it.
"""

import os

from treering.rl.reward_results import RewardResult, evaluate_group, evaluate_rollout
from treering.rl.tasks.task import Prompt, Task
from treering.runtime.ipc.child import Port, Ready, WeightAccess
from treering.runtime.ipc.launcher import Recipe
from treering.runtime.ipc.messages import RewardReply, RewardRequest, RewardRequests


def run_reward_worker(port: Port, _: WeightAccess, recipe: Recipe) -> None:
    """The role of the reward worker."""
    # With its process group end the processes that rewards have started.
    os.setpgid(0, 0)
    task = recipe.make_task()
    numbers = {prompt.prompt_id: number for number, prompt in enumerate(task.prompts)}
    port.send(Ready())
    while True:
        requests: RewardRequests = port.take()
        for request in requests.requests:
            prompt = task.prompts[numbers[request.rollouts[0].prompt_id]]
            port.send(RewardReply(key=request.key, results=_results(task, prompt, request)))


def _results(task: Task, prompt: Prompt, request: RewardRequest) -> list[RewardResult]:
    if request.is_group:
        return evaluate_group(task, prompt, request.rollouts)
    [rollout] = request.rollouts
    return [evaluate_rollout(task, prompt, rollout)]
