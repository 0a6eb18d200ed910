"""What happens to a command before it handles signals itself."""

import signal
import subprocess
import sys

from tests.cli.test_signals import ROOT, take_signals

# The import of the command line is where the signal comes.
INTERRUPTED = """
import importlib.abc, signal, sys

class Interrupts(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "treering.cli.main":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from treering.cli.start import main
main()
"""


def test_ctrl_c_while_the_command_line_is_imported_ends_it_without_a_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        preexec_fn=take_signals,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
