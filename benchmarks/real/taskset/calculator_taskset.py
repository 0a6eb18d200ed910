"""The calculator as a taskset of verifiers v1, which runs in verifiers' own interpreter."""

import httpx
import verifiers.v1 as vf
from calculator_rules import SUMS, observation, question, reward

__all__ = ["CalculatorHarness", "CalculatorTaskset"]

_CLIENT = httpx.AsyncClient(timeout=3600)


class CalculatorHarness(vf.Harness[vf.HarnessConfig]):
    """Plays both turns in this process."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        async def ask(messages):
            body = {"model": ctx.model, "messages": messages}
            headers = {"Authorization": f"Bearer {secret}"}
            answer = await _CLIENT.post(f"{endpoint}/chat/completions", json=body, headers=headers)
            answer.raise_for_status()
            return {"role": "assistant", "content": answer.json()["choices"][0]["message"].get("content") or ""}

        messages = question(*map(int, data.name.split(" + ")))
        said = await ask(messages)
        if seen := observation(said["content"]):
            await ask([*messages, said, seen])
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class CalculatorTask(vf.Task):
    """One sum, with the id that it has in our own environment."""

    @property
    def key(self) -> str:
        return self.data.name

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        texts = [node.message.content or "" for node in trace.nodes if node.sampled]
        return reward(*map(int, self.data.name.split(" + ")), texts)


class CalculatorTaskset(vf.Taskset[CalculatorTask, vf.TasksetConfig]):
    def load(self):
        return [CalculatorTask(vf.TaskData(name=f"{a} + {b}", prompt=f"What is {a} + {b}?")) for a, b in SUMS]
