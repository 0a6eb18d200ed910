"""The reward worker: runs rewards and observations, which are user code, in their own process.

It has no time limit of its own: the controller kills it.
"""

import os

from treering.rl.turns import evaluate_turn
from treering.runtime.ipc.child import Port, Ready, WeightAccess
from treering.runtime.ipc.messages import RewardReply, RewardRequests, RewardSettings


def run_reward_worker(port: Port, _: WeightAccess, settings: RewardSettings) -> None:
    """The role of the reward worker."""
    # With its process group end the processes that rewards have started.
    os.setpgid(0, 0)
    task = settings.recipe.make_task()
    prompts = {prompt.prompt_id: prompt for prompt in task.prompts}
    port.send(Ready())
    while True:
        requests: RewardRequests = port.take()
        for request in requests.requests:
            rollout, prompt = request.rollout, prompts[request.rollout.prompt_id]
            result = evaluate_turn(
                task, prompt, rollout, is_last_turn=request.is_last_turn, max_tokens=settings.max_tokens
            )
            port.send(RewardReply(key=rollout.key, result=result))
