"""Agent traces of verifiers v1, read and written without it: one run a line, or an episode of several."""

from treering.data.formats.traces.files import TraceTally, read_traces, write_traces
from treering.data.formats.traces.record import decode_trace, decode_traces, encode_trace, looks_like_trace

__all__ = [
    "TraceTally",
    "decode_trace",
    "decode_traces",
    "encode_trace",
    "looks_like_trace",
    "read_traces",
    "write_traces",
]
