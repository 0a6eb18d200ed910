"""Trajectories: records, files, rendering to tokens and masks, and generated stand-ins. No torch."""

from treering.data.formats.detect import FormatName
from treering.data.formats.files import append_trajectories, write_trajectories
from treering.data.formats.reader import read_trajectories
from treering.data.formats.traces import read_traces, write_traces
from treering.data.generate import AgentSpec, generate_trajectories
from treering.data.locate import DATA_VARIABLE, data_folder
from treering.data.rendering.rendered_trajectory import RenderedTrajectory, by_task
from treering.data.rendering.renderer import Renderer, Template, render
from treering.data.trace import Trace
from treering.data.trajectory import Message, TaskId, ToolCall, Trajectory

__all__ = [
    "DATA_VARIABLE",
    "AgentSpec",
    "FormatName",
    "Message",
    "RenderedTrajectory",
    "Renderer",
    "TaskId",
    "Template",
    "ToolCall",
    "Trace",
    "Trajectory",
    "append_trajectories",
    "by_task",
    "data_folder",
    "generate_trajectories",
    "read_traces",
    "read_trajectories",
    "render",
    "write_traces",
    "write_trajectories",
]
