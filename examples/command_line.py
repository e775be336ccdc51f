"""Command lines of the examples: flags that several share, and checks before any rank starts."""

from __future__ import annotations

import argparse
import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from launch import torchrun_ranks


def make_parser(description: str, *, ranks: int) -> ArgumentParser:
    """Return a parser that has ``--ranks``; an error of it is two lines."""
    parser = ArgumentParser(
        description=description,
        usage="%(prog)s [flags]; --help lists them",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--ranks", type=count, default=ranks, help="processes to start; under torchrun its count"
    )
    return parser


def parse(parser: ArgumentParser) -> Namespace:
    """Read the command line; torchrun's number of ranks counts, and replicas must divide it."""
    args = parser.parse_args()
    args.ranks = torchrun_ranks() or args.ranks
    replicas = getattr(args, "replicas", 1)
    if args.ranks % replicas:
        parser.error(f"{args.ranks} ranks cannot be divided over --replicas {replicas}")
    return args


def count(text: str) -> int:
    """Read a whole number of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def new_file(text: str) -> Path:
    """Read the path of a file that can be written."""
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"{text} is a folder, not a file")
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"{text} cannot be written: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentTypeError(f"{text} cannot be written: permission denied")
    return path


def old_file(text: str) -> Path:
    """Read the path of a file that can be read."""
    path = Path(text)
    if not path.is_file() or not os.access(path, os.R_OK):
        raise ArgumentTypeError(f"{text} is not a file that can be read")
    return path


def new_folder(text: str) -> Path:
    """Read the path of a folder that can be written to, or made."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise ArgumentTypeError(f"{text} is a file, not a folder")
    if not path.absolute().parent.is_dir():
        raise ArgumentTypeError(f"{text} cannot be made: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ArgumentTypeError(f"{text} cannot be written: permission denied")
    return path
