"""The same hashes of strings in every process.

Why: two families of reasoning-gym draw from sets of letters, whose order follows Python's hashes, which are random
unless PYTHONHASHSEED says otherwise. It is read at the start of the interpreter, so the script starts itself again.
"""

from __future__ import annotations

import os
import sys


def restart_with_fixed_hashes() -> None:
    """Returns at once where hashes are fixed; does not return otherwise. Call it before any work."""
    if sys.flags.hash_randomization:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
