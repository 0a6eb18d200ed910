"""Two players that are trained and a judge that is not, one after the other."""

import verifiers.v1 as vf
from in_process import InProcess

__all__ = ["SeatsEnv", "SeatsHarness", "SeatsTaskset"]


class SeatsHarness(InProcess):
    async def play(self, chat, data):
        messages = [{"role": "user", "content": data.prompt}]
        await chat.ask(messages)


class SeatsTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        return [vf.Task(vf.TaskData(prompt=f"task {i}, for two players")) for i in range(3)]


class SeatsConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class SeatsEnv(vf.Env[SeatsConfig]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def run(self, task, agents):
        for agent in (agents.first, agents.second, agents.judge):
            await agent.run(task)

    async def finalize(self, task, episode):
        for trace in episode.traces:
            trace.record_reward("length", sum(len(node.token_ids) for node in trace.nodes) % 5 / 4)
