"""Look at checkpoints, check them, and convert them, without starting ranks.

    python -m meshard.checkpoint list FOLDER
    python -m meshard.checkpoint show FOLDER [--step N]
    python -m meshard.checkpoint verify FOLDER [--step N | --all]
    python -m meshard.checkpoint prune FOLDER --keep N [--keep-every M]
    python -m meshard.checkpoint export FOLDER OUT [--step N] [--part NAME | --to dcp]
    python -m meshard.checkpoint import OLD NEW [--step N]

``FOLDER`` is a path or a URL. The exit code is 0 if all is well, 1 if a checkpoint is damaged or is
not there, 2 if the command is not understood.
"""

# What lists, shows and prunes reads JSON alone, so that it takes no seconds to import torch.
# ruff: noqa: PLC0415

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from meshard.checkpoint._protocol import commits
from meshard.checkpoint._protocol.commits import Commit, Rule
from meshard.checkpoint._protocol.storage import CheckpointError, Storage, storage_at
from meshard.checkpoint.progress import progress_bar

if TYPE_CHECKING:
    from meshard.checkpoint._protocol.loading import Reader
    from meshard.checkpoint.weights_files import FilePlan

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

    add("list", _list, "List the steps, in the order of their saves, with sizes and dates.")
    show = add("show", _show, "Show what is in a checkpoint.")
    verify = add("verify", _verify, "Read a checkpoint and name each file that is damaged.")
    verify.add_argument("--all", action="store_true", help="all steps")
    prune = add("prune", _prune, "Remove all but the newest checkpoints.")
    prune.add_argument("--keep", type=int, required=True, metavar="N", help="how many stay")
    prune.add_argument("--keep-every", type=int, metavar="M", help="and each multiple of M")
    export = add("export", _export, "Write the weights in Hugging Face's layout (safetensors).")
    export.add_argument("out", help="a new folder")
    export.add_argument("--part", default="model", help="the part to export (default: model)")
    export.add_argument(
        "--to",
        choices=("safetensors", "dcp"),
        default="safetensors",
        help="dcp: models and optimizers, for torch.distributed.checkpoint.load",
    )
    convert = add("import", _import, "Convert checkpoints of an older format, or of torch.")
    convert.add_argument("new", help="the folder of a run, where the checkpoints are written")
    for command in (show, verify, export, convert):
        text = "the step (default: the newest)"
        if command is convert:
            text = "one step only; or the number of what torch has saved without one (default: 0)"
        command.add_argument("--step", type=int, metavar="N", help=text)
    return parser


# --- tables --------------------------------------------------------------------------------


def _print_table(rows: list[tuple[Any, ...]]) -> None:
    texts = [tuple(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        line = "  ".join(each.ljust(width) for each, width in zip(row, widths, strict=True))
        print(line.rstrip())


def _content(storage: Storage, commit: Commit) -> dict[str, Any]:
    where = f"{storage.root}/{commit.folder}"
    return commits.content_of(storage.read(commit.manifest), where)


def _size_of(content: dict[str, Any]) -> str:
    if content["format_version"] < commits.VERSION:
        return f"format {content['format_version']}"
    return f"{sum(file[1] for file in content['files']) / 1e6:.1f} MB"


@contextlib.contextmanager
def _reading(commit: Commit) -> Iterator[None]:
    """Name the manifest in what a wrong form leads to."""
    try:
        yield
    except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
        text = f"{commit.manifest} has the right checksum, and not the form of a manifest."
        raise CheckpointError(text) from error


def _list(parsed: Any) -> int:
    storage = storage_at(parsed.folder)
    rows: list[tuple[Any, ...]] = [("step", "size", "ranks", "metric", "torch", "saved at")]
    code = 0
    for commit in commits.committed(storage):
        metric = "-" if commit.metric is None else f"{commit.metric:g}"
        try:
            with _reading(commit):
                content = _content(storage, commit)
                about = content["about"]
                told = [about.get(key, "?") for key in ("num_ranks", "torch", "saved_at")]
                rows.append((commit.step, _size_of(content), told[0], metric, *told[1:]))
        except CheckpointError:
            rows.append((commit.step, "?", "?", metric, "?", "the manifest is damaged"))
            code = 1
    if len(rows) == 1:
        commits.find(storage, None)  # raises
    _print_table(rows)
    return code


def _show(parsed: Any) -> int:
    storage = storage_at(parsed.folder)
    commit = commits.find(storage, parsed.step)
    with _reading(commit):
        _print_content(_content(storage, commit))
    return 0


def _print_content(content: dict[str, Any]) -> None:
    for name, value in {"step": content["step"], **content["about"]}.items():
        print(f"{name:10} {value}")
    print(f"{'size':10} {_size_of(content)} in {len(content['files'])} files")
    if content["format_version"] < commits.VERSION:
        print("An older format: python -m meshard.checkpoint import converts it.")
        return
    for name in content["rank_parts"]:
        print(f"{'per rank':10} {name}")
    for name, part in content["parts"].items():
        if part.get("kind") == "value":
            print(f"{'value':10} {name} = {str(part['tree'])[:60]}")
    rows: list[tuple[Any, ...]] = [("tensor", "shape", "dtype", "placements", "chunks")]
    for name, number in content["tensors"].items():
        dtype, shape, placed, *chunks = content["kinds"][number]
        size = "x".join(map(str, shape)) or "scalar"
        rows.append((name, size, dtype, " ".join(placed) or "-", len(chunks)))
    print()
    _print_table(rows)
    for name, tied in content["ties"].items():
        print(f"{name} is tied to {tied}")


# --- verify and prune ----------------------------------------------------------------------


def _verify(parsed: Any) -> int:
    from meshard.checkpoint.checkpointer import Checkpointer

    checkpointer = Checkpointer(parsed.folder)
    newest = commits.find(storage_at(parsed.folder), parsed.step)
    steps, code = checkpointer.steps() if parsed.all else [newest.step], 0
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
            print(f"step {step}: all files are as they were written ({num_bytes / 1e6:.1f} MB)")
    return code


def _prune(parsed: Any) -> int:
    if parsed.keep < 1:
        raise ValueError(f"--keep must be at least 1, got {parsed.keep}.")
    rule = Rule(parsed.keep, parsed.keep_every, None, is_higher_better=False)
    steps = commits.prune(storage_at(parsed.folder), rule)
    print(f"removed {len(steps)} checkpoint(s): {steps}" if steps else "nothing to remove")
    return 0


# --- export and import ---------------------------------------------------------------------


def _export(parsed: Any) -> int:
    from meshard.checkpoint.checkpointer import Checkpointer

    out = Path(parsed.out)
    with Checkpointer(parsed.folder).reader(parsed.step) as reader:
        out.mkdir(parents=True)
        try:
            text = (_export_for_torch if parsed.to == "dcp" else _export_weights)(
                reader, out, parsed.part
            )
        except BaseException:
            shutil.rmtree(out, ignore_errors=True)
            raise
    print(f"wrote {text} of step {reader.manifest.step} to {out}")
    return 0


def _export_for_torch(reader: Reader, out: Path, _: str) -> str:
    from meshard.checkpoint._protocol.convert import write_for_torch

    total = reader.manifest.num_bytes
    with progress_bar("export", total, wanted=None, is_first_rank=True) as progress:
        write_for_torch(reader, str(out), progress)
    return "models and optimizers"


def _export_weights(reader: Reader, out: Path, part: str) -> str:
    import torch

    from meshard._torch.private import dtype_of
    from meshard.checkpoint._protocol.plain import names_in
    from meshard.checkpoint.weights_files import INDEX, index_text, plan_files
    from meshard.checkpoint.weights_layout import Weight

    found, prefix = reader.manifest, f"{part}."
    others = names_in(found.parts.get(part, {}).get("tree"))  # as extra state
    tensors = {name.removeprefix("rank0/"): each for name, each in found.tensors.items()}
    own = [name for name in tensors if name not in found.tensors and name.startswith(prefix)]
    if own:
        print(f"of what each rank has saved for itself, rank 0's is taken: {', '.join(own)}")
    weights = [
        Weight(
            name.removeprefix(prefix),
            torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device="meta"),
        )
        for name, entry in tensors.items()
        if name.startswith(prefix) and name not in others
    ]
    if not weights:
        raise CheckpointError(f"step {found.step} has no part {part!r} with tensors.")
    files = plan_files(weights, _FILE_BYTES, None)
    total = sum(file.num_bytes for file in files)
    with progress_bar("export", total, wanted=None, is_first_rank=True) as progress:
        for file in files:
            with open(out / file.name, "wb") as output:
                _write_weights(output, file, reader, prefix, progress)
    if len(files) > 1:  # written last: a reader that finds no index knows that files are missing
        (out / INDEX).write_text(index_text(files))
    return f"{len(weights)} tensors"


def _write_weights(
    output: IO[bytes], file: FilePlan, reader: Reader, prefix: str, progress: Callable[[int], Any]
) -> None:
    from meshard.checkpoint._protocol.tensor_file import bytes_of, pieces

    output.write(file.header())
    for weight in file.weights:
        tensor = reader.tensor_of(prefix + weight.fqn)
        for piece in pieces(tensor):
            output.write(bytes_of(piece))
        progress(tensor.nbytes)


def _import(parsed: Any) -> int:
    from meshard.checkpoint._protocol.convert import write_as_new
    from meshard.checkpoint._protocol.loading import Reader
    from meshard.checkpoint.checkpointer import read_folder

    old, new = storage_at(parsed.folder), storage_at(parsed.new)
    new.lock()
    found = commits.committed(old)
    # "": the folder itself, which torch has written
    folders = [each.folder for each in found if parsed.step in (None, each.step)] if found else [""]
    if not folders:
        raise CheckpointError(f"step {parsed.step} is not in {parsed.folder}.")
    for folder in folders:
        manifest = read_folder(old, folder)
        step = manifest.step if manifest.step is not None else parsed.step or 0
        total = sum(chunk.num_bytes for each in manifest.tensors.values() for chunk in each.chunks)
        bar = progress_bar(f"step {step}", total, wanted=None, is_first_rank=True)
        with bar as progress, contextlib.closing(Reader(old, folder, manifest)) as reader:
            write_as_new(reader, new, step, progress)
        print(f"wrote step {step} to {new.root}")
        for name in manifest.unreadable:
            print(f"left out {name}, which only a class of its own can read")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
