"""Tasks that raise, exit, hang or have a reward that is not a number; the others answer once."""

import asyncio
import math

import verifiers.v1 as vf
from in_process import InProcess

__all__ = ["FaultyHarness", "FaultyTaskset"]


class FaultyHarness(InProcess):
    async def play(self, chat, data):
        await chat.ask([{"role": "user", "content": data.prompt}])
        match data.name:
            case "raises":
                raise RuntimeError("planted")
            case "exits":
                raise SystemExit("planted exit")
            case "hangs":
                await asyncio.sleep(600)


class FaultyTask(vf.Task):
    @property
    def key(self):
        return self.data.name

    @vf.reward
    async def one(self) -> float:
        return math.nan if self.data.name == "unrewarded" else 1.0


class FaultyTaskset(vf.Taskset[FaultyTask, vf.TasksetConfig]):
    def load(self):
        names = ("fine", "raises", "exits", "hangs", "unrewarded")
        return [FaultyTask(vf.TaskData(name=name, prompt=f"task {name}")) for name in names]
