"""A turn, then a context of many bytes; one that is too long ends the episode, as in verifiers' harnesses."""

import httpx
import verifiers.v1 as vf
from in_process import InProcess
from verifiers.v1.harnesses.utils.compaction import CONTEXT_OVERFLOW_MARKERS

__all__ = ["FullHarness", "FullTaskset"]


class FullHarness(InProcess):
    async def play(self, chat, data):
        await chat.ask([{"role": "user", "content": data.name}])
        try:
            await chat.ask([{"role": "user", "content": data.prompt}])
        except httpx.HTTPStatusError as error:
            if not any(marker in error.response.text.casefold() for marker in CONTEXT_OVERFLOW_MARKERS):
                raise


class FullTask(vf.Task):
    @property
    def key(self):
        return self.data.name

    @vf.reward
    async def one(self) -> float:
        return 1.0


class FullTaskset(vf.Taskset[FullTask, vf.TasksetConfig]):
    def load(self):
        # The chat markers add 19 tokens to a context, and at most 500 fit.
        return [FullTask(vf.TaskData(name=str(size), prompt="a" * (size - 19))) for size in (499, 500, 501)]
