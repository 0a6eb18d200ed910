"""The `treering` script: it begins before the command line is imported, so that Ctrl-C then prints no traceback."""

import os
import signal

ALLOCATOR_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The variable of the allocator's options from torch 2.9 on, and its older names; a user's value of any stays."""


def main() -> None:
    """Runs the command line on `sys.argv` and exits.

    Until `treering.cli.main` handles signals itself, SIGINT ends the process as SIGTERM does, without a word.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Torch reads it before its first allocation. Passes differ in size, so segments of fixed sizes fragment.
    if not any(name in os.environ for name in ALLOCATOR_OPTIONS):
        os.environ[ALLOCATOR_OPTIONS[0]] = "expandable_segments:True"
    from treering.cli.main import main as run

    run()
