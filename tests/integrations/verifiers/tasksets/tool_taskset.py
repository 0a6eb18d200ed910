"""A question, a tool's answer and another turn; every message is kept, so the chat is bridged."""

import verifiers.v1 as vf
from in_process import InProcess

__all__ = ["ToolHarness", "ToolTaskset"]


class ToolHarness(InProcess):
    TOOLS = ({"type": "function", "function": {"name": "echo", "parameters": {"type": "object", "properties": {}}}},)

    async def play(self, chat, data):
        messages = [{"role": "user", "content": data.prompt}]
        for turn in range(3):
            said = await chat.ask(messages)
            messages.append({key: value for key, value in said.items() if value is not None})
            messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": f"heard {turn}"})


class ToolTask(vf.Task):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        return sum(len(node.token_ids) for node in trace.nodes) % 5 / 4


class ToolTaskset(vf.Taskset[ToolTask, vf.TasksetConfig]):
    def load(self):
        return [ToolTask(vf.TaskData(prompt=f"task {i}, which is asked at some length")) for i in range(3)]
