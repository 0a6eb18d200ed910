"""Serve an engine over HTTP: tokens in and out as vLLM's server does, and completions as OpenAI's API does."""

from treering.serving.server import HostSampler, Server, ServerSettings

__all__ = ["HostSampler", "Server", "ServerSettings"]
