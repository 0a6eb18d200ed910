"""A task whose tools run in a server, from a module that is only on PYTHONPATH."""

import verifiers.v1 as vf

__all__ = ["ServedTaskset"]


class Tools(vf.Toolset):
    @vf.tool
    async def echo(self, text: str) -> str:
        """Says it again."""
        return text


class ServedTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        return [vf.Task(vf.TaskData(prompt="task"))]

    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.ToolsetConfig())]
