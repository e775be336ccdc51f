"""Imports of a library in processes where one name of torch is gone.

``python -m tests.house.without_names LIBRARY NAME ...`` prints each name without which the import
fails. Every name has a process that begins as a copy of this one, which has imported torch.
"""

import contextlib
import importlib
import os
import sys
from typing import Any


def holder_of(name: str) -> Any:
    """Return what the last part of a dotted name is an attribute of."""
    first, *parts = name.split(".")[:-1]
    value, path = importlib.import_module(first), first
    for part in parts:
        path = f"{path}.{part}"
        value = getattr(value, part) if hasattr(value, part) else importlib.import_module(path)
    return value


def main() -> None:
    """Try each name of the command line in a process of its own."""
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    library, *names = sys.argv[1:]
    for name in names:
        child = os.fork()
        if not child:
            with contextlib.suppress(AttributeError, TypeError):  # what cannot be removed stays
                delattr(holder_of(name), name.rpartition(".")[2])
            for module in (name, library):
                sys.modules.pop(module, None)
            try:
                importlib.import_module(library)
            except BaseException as error:
                print(f"{name} is needed: {error}", file=sys.stderr)
                print(name, flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
