"""``python -m meshard``: plan a job before it runs.

python -m meshard plan PKG:FUNCTION --world N     what a job takes and sends
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from meshard.planning import command as plan_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m meshard", description="See before you run.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    planning = commands.add_parser("plan", help="what a job takes and sends, before it runs")
    plan_command.add_arguments(planning)
    planning.set_defaults(run=plan_command.run)
    parsed = parser.parse_args(arguments)
    code: int = parsed.run(parsed)
    return code


if __name__ == "__main__":
    sys.exit(main())
