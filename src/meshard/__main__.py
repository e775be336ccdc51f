"""Commands: ``python -m meshard plan``, ``timeline`` and ``compare``. ``--help`` lists them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

Run = Callable[[argparse.Namespace], int]  # returns the exit code


def _add_timeline(parser: argparse.ArgumentParser) -> Run:
    """Summarize or draw what torch.profiler has recorded of some ranks."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="of export_chrome_trace")
    parser.add_argument("-o", "--output", help="a picture (.png, .svg or .pdf) to draw")

    def run(args: argparse.Namespace) -> int:
        from meshard.timeline import draw, read, summary_of  # noqa: PLC0415  # one command needs it

        timelines = read(args.files)
        if args.output is None:
            print("\n\n".join(map(summary_of, timelines)))
        else:
            draw(timelines, args.output)
        return 0

    return run


def _add_plan(parser: argparse.ArgumentParser) -> Run:
    """Tell whether a job fits, and what it takes and sends, before it runs."""
    from meshard.planning import command  # noqa: PLC0415  # one command needs it

    command.add_arguments(parser)
    return command.run


def _add_compare(parser: argparse.ArgumentParser) -> Run:
    """Run a script with torch's fully_shard or DDP and with meshard, and tell what differs."""
    parser.prefix_chars = ""  # what follows, -h too, is parsed by the command, as torchrun does
    parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def run(args: argparse.Namespace) -> int:
        from meshard._compare import command  # noqa: PLC0415  # one command needs it

        return command.run(args.arguments)

    return run


# Each function adds the arguments of one command to a parser, and returns the function that runs
# the command. Its docstring is the help text.
_COMMANDS: dict[str, Callable[[argparse.ArgumentParser], Run]] = {
    "compare": _add_compare,
    "plan": _add_plan,
    "timeline": _add_timeline,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m meshard", description=__doc__)
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, add in _COMMANDS.items():
        command = commands.add_parser(name, help=add.__doc__, description=add.__doc__)
        command.set_defaults(run=add(command))
    args = parser.parse_args(argv)
    run: Run = args.run
    try:
        return run(args)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
