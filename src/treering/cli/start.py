"""The `treering` script: it begins before the command line is imported, so that Ctrl-C then prints no traceback."""

import signal


def main() -> None:
    """Runs the command line on `sys.argv` and exits.

    Until `treering.cli.main` handles signals itself, SIGINT ends the process as SIGTERM does, without a word.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from treering.cli.main import main as run

    run()
