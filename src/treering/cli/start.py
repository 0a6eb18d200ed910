"""The `treering` script: prepare signals before the command line is imported, so that Ctrl-C prints no traceback."""

import os
import signal

ALLOCATOR_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variable of the allocator's options since torch 2.9, and its older names; a value set by the user stays."""


def main() -> None:
    """Run the command line on `sys.argv` and exit.

    Until `treering.cli.main` handles signals, SIGINT ends the process silently, as SIGTERM does.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Torch reads it before its first allocation. Passes differ in size, so segments of fixed size would fragment.
    if not any(name in os.environ for name in ALLOCATOR_OPTIONS):
        os.environ[ALLOCATOR_OPTIONS[0]] = "expandable_segments:True"
    from treering.cli.main import main as run

    run()
