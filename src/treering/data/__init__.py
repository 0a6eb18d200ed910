"""Trajectories: records, files, rendering to tokens and masks, and generated stand-ins. No torch."""

from treering.data.agent_trace import AgentTrace
from treering.data.formats.adapters.verifiers import read_traces, write_traces
from treering.data.formats.reader import FormatName, read_trajectories
from treering.data.formats.record_files import append_trajectories, write_trajectories
from treering.data.generate import DATA_VARIABLE, AgentSpec, data_folder, generate_trajectories
from treering.data.rendering.renderer import Renderer, Template, render
from treering.data.trajectory import Message, RenderedTrajectory, TaskId, ToolCall, Trajectory, by_task

__all__ = [
    "DATA_VARIABLE",
    "AgentSpec",
    "AgentTrace",
    "FormatName",
    "Message",
    "RenderedTrajectory",
    "Renderer",
    "TaskId",
    "Template",
    "ToolCall",
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
