"""Imported by the fork server alone, first of all: lets it end with its parent, and at once.

While it imports torch it would not notice that its parent is gone, and tearing torch down takes more than a second. The
processes that it forks have their own ends.
"""

import atexit
import os

from treering.runtime.ipc.child import SERVER_PARENT, die_with_parent

atexit.register(os._exit, 0)
if SERVER_PARENT in os.environ:
    die_with_parent()
    if os.environ[SERVER_PARENT] != str(os.getppid()):
        os._exit(0)
