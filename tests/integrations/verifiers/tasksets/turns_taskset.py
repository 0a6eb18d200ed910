"""Three questions of a user; a renderer that drops earlier thoughts renders each turn again."""

import verifiers.v1 as vf
from in_process import InProcess

__all__ = ["TurnsHarness", "TurnsTaskset"]


class TurnsHarness(InProcess):
    async def play(self, chat, data):
        messages = [{"role": "user", "content": data.prompt}]
        for turn in range(3):
            said = await chat.ask(messages)
            messages.append({"role": "assistant", "content": said.get("content") or ""})
            messages.append({"role": "user", "content": f"and then {turn}?"})


class TurnsTask(vf.Task):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        return sum(len(node.token_ids) for node in trace.nodes) % 5 / 4


class TurnsTaskset(vf.Taskset[TurnsTask, vf.TasksetConfig]):
    def load(self):
        return [TurnsTask(vf.TaskData(prompt=f"task {i}, which is asked at some length")) for i in range(3)]
