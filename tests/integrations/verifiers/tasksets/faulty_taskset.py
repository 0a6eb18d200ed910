"""Tasks that raise, exit, hang, block or end their process; the others answer once."""

import asyncio
import os
import time

import verifiers.v1 as vf
from in_process import InProcess

__all__ = ["FaultyHarness", "FaultyTaskset"]


class FaultyHarness(InProcess):
    async def play(self, chat, data):
        await chat.ask([{"role": "user", "content": data.prompt}])
        if os.environ.get("FAULTY_HEALED"):
            return
        match data.name:
            case "raises":
                raise RuntimeError("planted")
            case "exits":
                raise SystemExit("planted exit")
            case "hangs":
                await asyncio.sleep(600)
            case "blocks":
                time.sleep(600)
            case "dies":
                os._exit(7)


class FaultyTask(vf.Task):
    @property
    def key(self):
        return self.data.name

    @vf.reward
    async def one(self) -> float:
        return 1.0


class FaultyTaskset(vf.Taskset[FaultyTask, vf.TasksetConfig]):
    def load(self):
        names = os.environ.get("FAULTY_TASKS", "fine,raises,exits,hangs").split(",")
        return [FaultyTask(vf.TaskData(name=name, prompt=f"task {name}")) for name in names]
