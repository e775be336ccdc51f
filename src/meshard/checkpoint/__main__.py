"""Look at checkpoints, check them and export their weights, without starting ranks.

    python -m meshard.checkpoint list FOLDER
    python -m meshard.checkpoint show FOLDER [--step N]
    python -m meshard.checkpoint verify FOLDER [--step N | --all]
    python -m meshard.checkpoint prune FOLDER --keep N [--keep-every M]
    python -m meshard.checkpoint export FOLDER OUT [--step N] [--part NAME]

``FOLDER`` is a path or a URL. The exit code is 0 if all is well, 1 if a checkpoint is damaged or is
not there, 2 if the command is not understood.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from meshard._torch.private import dtype_of
from meshard.checkpoint._protocol.loading import Read, Reader, check, fill
from meshard.checkpoint._protocol.manifest import CheckpointError, TensorEntry
from meshard.checkpoint._protocol.plain import names_in
from meshard.checkpoint.checkpointer import Checkpointer
from meshard.checkpoint.progress import progress_bar
from meshard.checkpoint.weights_files import INDEX, FilePlan, index_text, plan_files, write_tensor
from meshard.checkpoint.weights_layout import Weight
from meshard.diagnostics import aligned, readable_bytes

_FILE_BYTES = 5 * 10**9  # of one exported file, as Hugging Face's libraries have it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
    except (CheckpointError, OSError, EOFError, ImportError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m meshard.checkpoint", description=(__doc__ or "").splitlines()[0]
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[Any], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("folder", help="a path, or a URL such as s3://bucket/run")
        command.set_defaults(run=run)
        return command

    add("list", _list, "List the steps, with sizes and dates.")
    show = add("show", _show, "Show what is in a checkpoint.")
    verify = add("verify", _verify, "Read a checkpoint and name each file that is damaged.")
    verify.add_argument("--all", action="store_true", help="all steps")
    prune = add("prune", _prune, "Remove all but the newest checkpoints.")
    prune.add_argument("--keep", type=int, required=True, metavar="N", help="how many stay")
    prune.add_argument("--keep-every", type=int, metavar="M", help="and each multiple of M")
    export = add("export", _export, "Write the weights in Hugging Face's layout (safetensors).")
    export.add_argument("out", help="a new folder")
    export.add_argument("--part", default="model", help="the part to export (default: model)")
    for command in (show, verify, export):
        command.add_argument("--step", type=int, metavar="N", help="the step (default: the newest)")
    return parser


# --- tables --------------------------------------------------------------------------------


def _print_table(head: tuple[str, ...], rows: list[list[Any]]) -> None:
    print(*aligned([head, *(tuple(map(str, row)) for row in rows)]), sep="\n")


def _list(parsed: Any) -> int:
    checkpointer = Checkpointer(parsed.folder)
    rows, code = [], 0
    for step in checkpointer.steps():
        try:
            found = checkpointer.manifest(step)
        except CheckpointError:
            rows.append([step, "?", "?", "?", "the manifest is damaged"])
            code = 1
            continue
        about = found.about
        rows.append(
            [
                step,
                readable_bytes(found.num_bytes),
                about["num_ranks"],
                about["torch"],
                about["saved_at"],
            ]
        )
    if not rows:
        return _none_in(parsed.folder)
    _print_table(("step", "size", "ranks", "torch", "saved at"), rows)
    return code


def _none_in(folder: str) -> int:
    print(f"There is no checkpoint in {folder}.", file=sys.stderr)
    return 1


def _show(parsed: Any) -> int:
    found = Checkpointer(parsed.folder).manifest(parsed.step)
    for name, value in {"step": found.step, **found.about}.items():
        print(f"{name:10} {value}")
    print(f"{'size':10} {readable_bytes(found.num_bytes)} in {len(found.files())} files")
    own = {name for parts in found.rank_parts for name in parts}
    for name in sorted(own):
        print(f"{'per rank':10} {name}")
    values = {
        name: part["tree"] for name, part in found.parts.items() if part.get("kind") == "value"
    }
    for name, value in values.items():
        print(f"{'value':10} {name} = {str(value)[:60]}")
    rows = [
        [
            name,
            "x".join(map(str, each.shape)) or "scalar",
            each.dtype,
            " ".join(each.placements) or "-",
            len(each.chunks),
        ]
        for name, each in found.tensors.items()
    ]
    print()
    _print_table(("tensor", "shape", "dtype", "placements", "chunks"), rows)
    for name, tied in found.ties.items():
        print(f"{name} is tied to {tied}")
    return 0


# --- verify, prune, export -----------------------------------------------------------------


def _verify(parsed: Any) -> int:
    checkpointer = Checkpointer(parsed.folder)
    steps = (
        checkpointer.steps()
        if parsed.all
        else [checkpointer.latest_step() if parsed.step is None else parsed.step]
    )
    code = 0 if steps else _none_in(parsed.folder)
    for step in steps:
        try:
            num_bytes = checkpointer.manifest(step).num_bytes
        except CheckpointError:
            num_bytes = 0  # the command ``verify`` tells what is wrong
        with progress_bar(f"step {step}", num_bytes, wanted=None, is_first_rank=True) as progress:
            damages = checkpointer.verify(step, progress=progress)
        for damage in damages:
            print(f"step {step}: {damage.file} {damage.what}")
        if damages:
            code = 1
        else:
            print(f"step {step}: all files are as they were written ({readable_bytes(num_bytes)})")
    return code


def _prune(parsed: Any) -> int:
    checkpointer = Checkpointer(parsed.folder, keep=parsed.keep, keep_every=parsed.keep_every)
    removed = checkpointer.prune()
    print(f"removed {len(removed)} checkpoint(s): {removed}" if removed else "nothing to remove")
    return 0


def _export(parsed: Any) -> int:
    checkpointer, out = Checkpointer(parsed.folder), Path(parsed.out)
    found = checkpointer.manifest(parsed.step)
    prefix = f"{parsed.part}."
    others = names_in(found.parts.get(parsed.part, {}).get("tree"))  # as extra state
    entries = {
        name.removeprefix(prefix): entry
        for name, entry in found.tensors.items()
        if name.startswith(prefix) and name not in others
    }
    if not entries:
        raise CheckpointError(f"step {found.step} has no part {parsed.part!r} with tensors.")
    weights = [
        Weight(name, torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device="meta"))
        for name, entry in entries.items()
    ]
    files = plan_files(weights, _FILE_BYTES, None)
    out.mkdir(parents=True)
    try:
        with checkpointer.reader(found.step) as reader:
            _write(reader, files, entries, out)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    print(f"wrote {len(entries)} tensors of step {found.step} to {out}")
    return 0


def _write(
    reader: Reader, files: list[FilePlan], entries: dict[str, TensorEntry], out: Path
) -> None:
    total = sum(chunk.blob.size for entry in entries.values() for chunk in entry.chunks)
    with progress_bar("export", total, wanted=None, is_first_rank=True) as progress:
        for file in files:
            own = [entries[weight.fqn] for weight in file.weights]
            reader.expect(chunk.blob.span for entry in own for chunk in entry.chunks)
            with open(out / file.name, "wb") as output:
                output.write(file.header())
                for entry in own:
                    write_tensor(output, _read(reader, entry, progress))
    if len(files) > 1:  # written last: a reader that finds no index knows that files are missing
        (out / INDEX).write_text(index_text(files))


def _read(reader: Reader, entry: TensorEntry, progress: Callable[[int], Any]) -> torch.Tensor:
    """Read a whole tensor, checked."""
    dtype = dtype_of(entry.dtype)
    tensor = torch.empty(entry.shape, dtype=dtype, device="cpu")
    for chunk in entry.chunks:
        target = tensor
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            target = target.narrow(dim, offset, size)
        read = Read(chunk, dtype, (0,) * len(chunk.sizes), chunk.sizes, target)
        check(reader, [read])
        fill(reader, [read])
        progress(chunk.blob.size)
    return tensor


if __name__ == "__main__":
    raise SystemExit(main())
