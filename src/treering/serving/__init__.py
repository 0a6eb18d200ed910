"""An engine over HTTP: tokens in and tokens out as vLLM's server, and completions as OpenAI's."""

from treering.serving.server import HostSampler, Server, ServerSettings

__all__ = ["HostSampler", "Server", "ServerSettings"]
