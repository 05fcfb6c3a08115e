"""`python -m baltoro` and the `baltoro` command: one verb per module of `baltoro/cli`.

A verb's module is imported only when the verb is used, so `--help` answers at once. Errors of the tree are shown as
one line; a UserError ends with exit code 2, anything else of ours with 1.
"""

from __future__ import annotations

import sys

from baltoro.cli import app
from baltoro.errors import BaltoroError, UserError


def main() -> None:
    """Run one verb."""
    try:
        app()
    except BaltoroError as error:
        print(f"baltoro: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)


if __name__ == "__main__":
    main()
