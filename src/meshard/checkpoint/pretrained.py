"""Weights in the files of Hugging Face: written by all ranks, read by each rank in part."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import nn

from meshard._engine.unit import own_class
from meshard._torch.user_line import listed, warn_user
from meshard.checkpoint.progress import progress_bar
from meshard.checkpoint.weights_files import (
    INDEX,
    NUMBERED,
    SINGLE,
    UNFINISHED,
    FilePlan,
    StoredTensor,
    in_file_order,
    index_text,
    opened,
    parse_size,
    plan_files,
    stored_tensors,
    sync_folder,
    write_tensor,
)
from meshard.checkpoint.weights_gather import (
    Agreement,
    Packed,
    Unsharded,
    agreed,
    batches,
    check_dtype,
    copies,
    pack,
    unsharded_bytes,
)
from meshard.checkpoint.weights_layout import (
    Weight,
    check_are_held,
    check_have_values,
    device_of_weights,
    meshes_of,
    own_rank,
    ranks_of_meshes,
    unchecked_weights,
    weights_of,
    without_wrappers,
)
from meshard.checkpoint.weights_meta import computed_buffers, leave_meta_device

_ASIDE = ".beside.saving"  # where small files are until they are renamed
_BATCH_BYTES = 64 * 2**20  # unsharded bytes that a writer holds at a time

# --- save_pretrained -------------------------------------------------------------------------


def save_pretrained(
    module: nn.Module,
    folder: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    *,
    dtype: torch.dtype | None = None,
    progress: bool | None = None,
) -> None:
    """Write the weights of ``module`` as safetensors, which ``from_pretrained`` reads.

    The folder gets ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and their index,
    with what ``state_dict()`` has, and of a module with a ``config`` (and ``generation_config``)
    these too. Tied parameters are written once, under their first name. The module stays as it is.
    Of a module in ``torch.compile``, DDP or ``AveragedModel``, the inner one is written.

    **Collective:** every rank of the module's meshes. Each writes whole files, which are gathered
    to it in parts of ``max(64 MiB, largest tensor)``. It holds one of these and one tensor made of
    it (while it is gathered, on n ranks an n-th part to send, and with gloo a second copy). More
    and smaller files keep more ranks busy.

    Files are written under other names, synced, and renamed when all are complete, the index (or
    the single file) last. What a killed save leaves has neither, and no reader takes it for whole;
    the former weights of the folder are removed at the moment of renaming. An error on any rank is
    raised on all, and leaves the folder as it was, unless it is one of renaming.

    Args:
        module: A module with or without units, between steps.
        folder: Where to write. It is made, and must be the same one on all ranks.
        max_shard_size: Of a file, as bytes or a text: "5GB" is 5 * 10**9, "1GiB" 2**30. A larger
            tensor has a file of its own.
        dtype: Cast floating-point tensors to it.
        progress: A progress bar on the first rank; None: if its stderr is a terminal.

    Raises:
        ImportError: ``progress=True`` without tqdm.
        NotImplementedError: A parameter is of a tensor subclass, such as float8, or ranks have
            different tensors (experts on meshes of their own).
        RuntimeError: A forward or backward runs, gradients are pending, the module is inside
            ``unsharded_params``, or another rank failed.
        ValueError: Tensors are on the meta device, the module has adapters of PEFT, or an argument
            is wrong.

    >>> import tempfile, torch, meshard
    >>> from meshard.checkpoint import save_pretrained
    >>> layer = meshard.fully_shard(torch.nn.Linear(4, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(layer, folder)
    ...     os.listdir(folder)
    ['model.safetensors']
    """
    check_dtype(dtype)
    module = without_wrappers(module)
    with agreed(_agreement_of(module, "save_pretrained"), "save_pretrained"):
        weights = weights_of(module, "save_pretrained")
        _check_no_adapters(module, weights)
        check_have_values(weights, "save_pretrained")
        files = plan_files(_without_ties(weights), parse_size(max_shard_size), dtype)
    meshes = meshes_of(module, weights)
    ranks = ranks_of_meshes(meshes)
    agreement = Agreement(meshes, "(save_pretrained)")
    agreement.check_same_tensors(weights, with_names=True)
    agreement.check_copies(weights, len(ranks))
    save = _Save(Path(folder), files, ranks, agreement)
    total = sum(file.num_bytes for file in files)
    is_first = own_rank() == ranks[0]
    with (
        save,
        progress_bar("saving", total, wanted=progress, is_first_rank=is_first) as advance,
    ):
        for begin in range(0, len(files), len(ranks)):
            save.write_together(files[begin : begin + len(ranks)], dtype, advance)
        save.commit(module, dtype)


def _agreement_of(module: nn.Module, caller: str) -> Agreement:
    """Return the agreement of a module's ranks, before anything of it is checked."""
    return Agreement(meshes_of(module, unchecked_weights(module)), f"({caller})")


def _check_no_adapters(module: nn.Module, weights: list[Weight]) -> None:
    if hasattr(module, "get_base_model") or any(".base_layer." in each.fqn for each in weights):
        raise ValueError(
            f"save_pretrained got a {own_class(module).__name__} with adapters of PEFT, and "
            "from_pretrained would find none of its names; save the adapters by PEFT's own method "
            "(docs/how-to/peft.md), or merge them first (docs/how-to/weights.md, 'Merge adapters')."
        )


def _without_ties(weights: list[Weight]) -> list[Weight]:
    """Return the first weight of each tensor; tied parameters have several."""
    first: dict[int, Weight] = {}
    for weight in weights:
        first.setdefault(id(weight.tensor), weight)
    return list(first.values())


class _Save:
    """One save: files under other names, until ``commit`` renames them."""

    def __init__(
        self, folder: Path, files: list[FilePlan], ranks: list[int], agreement: Agreement
    ) -> None:
        self._folder, self._files, self._ranks = folder, files, ranks
        self._agreement = agreement
        self._unfinished: list[Path] = []  # what this rank has written and not renamed yet
        self._aside: Path | None = None  # the folder of small files, which the first rank renames

    def __enter__(self) -> None:
        with self._agree():
            if own_rank() == self._ranks[0]:
                self._folder.mkdir(parents=True, exist_ok=True)
        with self._agree():
            if not self._folder.is_dir():
                raise FileNotFoundError(
                    f"rank {own_rank()} does not see the folder {self._folder} that rank "
                    f"{self._ranks[0]} has made; it must be on a file system that all ranks share."
                )

    def __exit__(self, *_: object) -> None:
        for path in self._unfinished:
            path.unlink(missing_ok=True)
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)

    def _agree(self) -> contextlib.AbstractContextManager[None]:
        return agreed(self._agreement, "save_pretrained")

    def write_together(
        self, files: list[FilePlan], dtype: torch.dtype | None, advance: Callable[[int], None]
    ) -> None:
        """Write one file on each of the first ranks. **Collective.**"""
        writers = self._ranks[: len(files)]
        own = files[writers.index(own_rank())] if own_rank() in writers else None
        with contextlib.ExitStack() as stack:
            output: IO[bytes] | None = None
            with self._agree():
                if own is not None:
                    output = self._begin(own, stack)
            parts = (batches(file.weights, _BATCH_BYTES, dtype) for file in files)
            for row in itertools.zip_longest(*parts):
                pairs = [(w, b) for w, b in zip(writers, row, strict=True) if b is not None]
                mine = self._gather_each(pairs, dtype)
                with self._agree():
                    while mine:
                        assert output is not None  # only ranks that write get tensors
                        write_tensor(output, mine.pop(0)())
                advance(sum(unsharded_bytes(w, dtype) for _, batch in pairs for w in batch))
            with self._agree():
                if output is not None:
                    output.flush()
                    os.fsync(output.fileno())

    def _begin(self, file: FilePlan, stack: contextlib.ExitStack) -> IO[bytes]:
        path = self._folder / file.unfinished
        self._unfinished.append(path)
        output = stack.enter_context(open(path, "wb"))  # noqa: SIM115  # the stack closes it
        output.write(file.header())
        return output

    @torch.no_grad()
    def _gather_each(
        self, pairs: list[tuple[int, list[Weight]]], dtype: torch.dtype | None
    ) -> list[Unsharded]:
        """Send each batch to its writer; return functions that make what this rank got."""
        mine: list[Unsharded] = []
        for writer, batch in pairs:
            packed: list[Packed] = []
            with self._agree():
                packed = pack(batch, dtype)
            found = copies(batch, dtype) if writer == own_rank() else {}
            while packed:
                found.update(packed.pop(0).gather(writer, batch[0].fqn))
            mine += [found[weight.fqn] for weight in batch if weight.fqn in found]
        return mine

    def commit(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        """Rename all files, last the one that readers open first. **Collective.**"""
        is_first = own_rank() == self._ranks[0]
        beside: list[Path] = []
        with self._agree():
            if is_first:
                self._check_all_are_here()
                beside = self._write_beside(module, dtype)
        with self._agree():
            if is_first:
                self._rename(beside)
        self._unfinished.clear()

    def _check_all_are_here(self) -> None:
        for file, writer in zip(self._files, itertools.cycle(self._ranks), strict=False):
            if not (self._folder / file.unfinished).is_file():
                raise FileNotFoundError(
                    f"rank {own_rank()} does not see what rank {writer} has written into "
                    f"{self._folder}; it must be on a file system that all ranks share."
                )

    def _write_beside(self, module: nn.Module, dtype: torch.dtype | None) -> list[Path]:
        """Write the configurations and the index, if there are any, to a folder; return that."""
        aside = self._folder / _ASIDE
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        self._aside = aside
        _write_configs(module, aside, dtype)
        configs = sorted(aside.iterdir())
        if len(self._files) == 1:
            return configs
        (aside / INDEX).write_text(index_text(self._files))
        return [*configs, aside / INDEX]

    def _rename(self, beside: list[Path]) -> None:
        folder, names = self._folder, {file.name for file in self._files}
        numbered = [path for path in folder.iterdir() if NUMBERED.fullmatch(path.name)]
        former = [path for path in (folder / INDEX, *numbered) if path.exists()]
        if names != {SINGLE} or beside or former:  # replacing one file by another is atomic
            # Remove the files of an earlier save, because some readers read every file that they
            # find. The files that readers prefer go first: the single file, then the index.
            for path in (folder / SINGLE, *former):
                path.unlink(missing_ok=True)
        pairs = [(folder / file.unfinished, folder / file.name) for file in self._files]
        others = [(path, folder / path.name) for path in beside]
        # Last comes the file that readers open first: the single one, or the index.
        ordered = [*others, *pairs] if names == {SINGLE} else [*pairs, *others]
        for unfinished, finished in ordered[:-1]:
            os.replace(unfinished, finished)
        sync_folder(folder)
        os.replace(*ordered[-1])
        sync_folder(folder)
        for path in folder.iterdir():
            if UNFINISHED.fullmatch(path.name):  # left by a save that was killed
                path.unlink()


def _write_configs(module: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Write the configurations of a Hugging Face model, as its ``save_pretrained`` does."""
    config: Any = getattr(module, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [own_class(module).__name__]
        dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
        saved = dtype or (dtypes.pop() if len(dtypes) == 1 else None)
        if saved is not None:
            name = "dtype" if hasattr(config, "dtype") else "torch_dtype"
            setattr(config, name, str(saved).removeprefix("torch."))
        config.save_pretrained(folder)
    elif hasattr(config, "to_json_file"):
        config.to_json_file(folder / "config.json")
    generation: Any = getattr(module, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)


# --- load_pretrained -------------------------------------------------------------------------


class LoadReport(NamedTuple):
    """What ``load_pretrained`` has found."""

    loaded: list[str]  # names of the module, each name of a tied parameter included
    missing: list[str]  # names of the module that the files lack
    unexpected: list[str]  # names in the files that the module lacks, before ``rename``


Rename = Callable[[str], "str | None"] | Mapping[str, str]


def load_pretrained(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    rename: Rename | None = None,
    progress: bool | None = None,
) -> LoadReport:
    """Fill ``module`` from safetensors: a folder that Hugging Face's libraries read, or one file.

    Each rank reads its own rows only. A model on the meta device gets memory for its shards, and
    the parameters of its units stay the same objects. Values are cast to the dtypes of the module,
    as ``load_state_dict`` does, between floating-point dtypes and between integers; other changes
    of dtype are refused, and so are those from and to float8, which would lose its scales.
    A parameter of several names needs one of them in the files. Of a module in ``torch.compile``,
    DDP or ``AveragedModel``, the inner one is filled.

    Of a model on the meta device, buffers that are not persistent are in no file. If the model can
    be built from its ``config`` (those of transformers), they are computed as its constructor does.
    Otherwise build the model inside ``meta_parameters()``, or call ``meshard.materialize`` first.

    **Collective:** every rank of the module's meshes, which all see the same files. Everything is
    checked on all ranks before anything is written: a refusal on one is raised on all, and leaves
    the module as it was. Beside the shards, a rank holds its rows of one tensor.

    Args:
        module: A module with or without units, between steps.
        path: A folder with ``model.safetensors`` or an index; or a file, or an index.
        strict: Refuse missing and unexpected names. With False, the first rank warns if there are
            some of both. What is on the meta device must be in the files in any case.
        rename: From names in the files to names in the module: a function, which returns None for
            what is to be left out; or a table of regular expressions and their replacements, of
            which the first that is found in a name is applied (as ``key_mapping`` of transformers).
        progress: A progress bar on the first rank; None: if its stderr is a terminal.

    Returns:
        The names that were loaded, that are missing and that were not expected.

    Raises:
        FileNotFoundError: There is nothing at ``path``.
        ImportError: safetensors is not installed, or with ``progress=True`` tqdm is not.
        NotImplementedError: A parameter is of a tensor subclass, such as float8, or a hook of
            ``state_dict()`` makes what it has.
        RuntimeError: A forward or backward runs, gradients are pending, the module is inside
            ``unsharded_params``, or another rank failed. If reading fails midway, the message says
            that the module is filled in part.
        ValueError: Names, shapes or dtypes do not fit, a file is truncated or pickled, or
            buffers would be left without values.

    >>> import tempfile, torch, meshard
    >>> from meshard.checkpoint import load_pretrained, save_pretrained
    >>> layer = meshard.fully_shard(torch.nn.Linear(4, 2))
    >>> with torch.device("meta"):
    ...     other = meshard.fully_shard(torch.nn.Linear(4, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(layer, folder)
    ...     load_pretrained(other, folder)
    LoadReport(loaded=['weight', 'bias'], missing=[], unexpected=[])
    """
    if rename is not None and not callable(rename) and not isinstance(rename, Mapping):
        raise TypeError(f"rename must be a function, a mapping or None, got {rename!r}.")
    module = without_wrappers(module)
    with agreed(_agreement_of(module, "load_pretrained"), "load_pretrained"):
        weights = weights_of(module, "load_pretrained")
    meshes = meshes_of(module, weights)
    agreement = Agreement(meshes, "(load_pretrained)")
    is_first = own_rank() == ranks_of_meshes(meshes)[0]
    with contextlib.ExitStack() as stack:
        with agreed(agreement, "load_pretrained"):
            files = stored_tensors(Path(path))
            stored = _renamed(files, rename)
            check_are_held(module, weights)
            plan = _plan(weights, stored, strict=strict)
            buffers = computed_buffers(module)
            total = sum(source.num_bytes for source in plan.sources)
            bar = progress_bar("loading", total, wanted=progress, is_first_rank=is_first)
            advance = stack.enter_context(bar)
        # The fingerprint is that of the files and not of the plan, because ranks with different
        # experts read different tensors.
        if not all(agreement.are_same([_fingerprint(files)])):
            raise ValueError(
                f"the ranks see different files at {path}: other names, shapes or dtypes. It must "
                "be the same on all ranks."
            )
        with agreed(agreement, "load_pretrained"):
            try:
                device = device_of_weights(meshes) if meshes else torch.get_default_device()
                leave_meta_device(module, device, buffers)
                _fill(weights_of(module, "load_pretrained"), plan, advance)
            except Exception as error:
                raise RuntimeError(
                    f"load_pretrained failed while it was reading, after everything had been "
                    f"checked ({error}); the module is filled in part. Load it again."
                ) from error
    missing, unexpected = plan.report.missing, plan.report.unexpected
    if is_first and missing and unexpected:
        warn_user(
            f"load_pretrained left {listed(missing)} as before, and did not read "
            f"{listed(unexpected)}. If these are the same weights under other names, pass rename=. "
            "A function may return None there for what is not to be read."
        )
    return plan.report


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is to be read."""

    sources: list[StoredTensor]
    fqns: dict[str, str]  # name in the files to name in the module
    report: LoadReport


def _fingerprint(files: dict[str, StoredTensor]) -> int:
    """Return a number that differs if ranks see other files."""
    text = [f"{name} {each.shape} {each.dtype_name}" for name, each in sorted(files.items())]
    return zlib.crc32("\n".join(text).encode())


def _renamed(
    stored: dict[str, StoredTensor], rename: Rename | None
) -> dict[str, tuple[str, StoredTensor]]:
    """Return the stored tensors with their names in the module, by those in the files."""
    found: dict[str, tuple[str, StoredTensor]] = {}
    origins: dict[str, str] = {}
    for name, tensor in stored.items():
        fqn = _new_name(name, rename)
        if fqn is None:
            continue
        if fqn in origins:
            raise ValueError(f"rename gives {name!r} and {origins[fqn]!r} one name, {fqn!r}.")
        origins[fqn] = name
        found[name] = fqn, tensor
    return found


def _new_name(name: str, rename: Rename | None) -> str | None:
    if rename is None:
        return name
    if callable(rename):
        new = rename(name)
        if new is not None and not isinstance(new, str):
            raise TypeError(f"rename({name!r}) returned {new!r}; return a name, or None.")
        return new
    for pattern, replacement in rename.items():
        new, count = re.subn(pattern, replacement, name)
        if count:
            return new
    return name


def _plan(
    weights: list[Weight], stored: dict[str, tuple[str, StoredTensor]], *, strict: bool
) -> _Plan:
    """Choose what to read, or raise a ValueError."""
    by_fqn = dict(stored.values())
    names: dict[int, list[str]] = {}  # of each tensor of the module
    for weight in weights:
        names.setdefault(id(weight.tensor), []).append(weight.fqn)
    loaded: list[str] = []
    missing: list[str] = []
    chosen: list[str] = []
    for weight in weights:
        given = [fqn for fqn in names[id(weight.tensor)] if fqn in by_fqn]
        (loaded if given else missing).append(weight.fqn)
        if given and given[0] == weight.fqn:
            _check_fits(weight, by_fqn[weight.fqn])
            chosen.append(weight.fqn)
    own = set(loaded) | set(missing)
    unexpected = [name for name, (fqn, _) in stored.items() if fqn not in own]
    without = [weight.fqn for weight in weights if weight.local.is_meta and weight.fqn in missing]
    if strict and (missing or unexpected):
        raise ValueError(
            f"the names do not fit: missing {listed(missing) or 'none'}; unexpected "
            f"{listed(unexpected) or 'none'}. Pass rename=, which maps names in the files to "
            "names in the module, or strict=False. If transformers itself changes these weights "
            "when it loads them, as it stacks experts, rewrite the files once: "
            "save_pretrained(Model.from_pretrained(old), new)."
        )
    if without:
        raise ValueError(
            f"{listed(without)} are on the meta device and not in the files, so they would have no "
            "values; call meshard.materialize(module) before load_pretrained."
        )
    fqns = {by_fqn[fqn].name: fqn for fqn in chosen}
    sources = [by_fqn[fqn] for fqn in chosen]
    return _Plan(sources, fqns, LoadReport(loaded, missing, unexpected))


def _check_fits(weight: Weight, stored: StoredTensor) -> None:
    if stored.shape != weight.shape:
        raise ValueError(
            f"{weight.fqn!r} has shape {weight.shape} in the module, and {stored.shape} in "
            f"{stored.path} (as {stored.name!r})."
        )
    if stored.dtype != weight.dtype and _kind(stored.dtype) != _kind(weight.dtype):
        raise ValueError(
            f"{weight.fqn!r} is {weight.dtype} in the module, and {stored.dtype} in {stored.path}; "
            "only floating-point dtypes of 16 bits or more are cast to each other, and integers."
        )


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "floating" if dtype.itemsize > 1 else str(dtype)
    return "complex" if dtype.is_complex else "bool" if dtype == torch.bool else "integer"


@torch.no_grad()
def _fill(weights: list[Weight], plan: _Plan, advance: Callable[[int], None]) -> None:
    """Read this rank's boxes into its local tensors."""
    by_fqn = {weight.fqn: weight for weight in weights}
    for path, sources in in_file_order(plan.sources).items():
        with opened(path) as contents:
            for source in sources:
                weight = by_fqn[plan.fqns[source.name]]
                box = weight.own_box
                if box.numel:
                    weight.local.copy_(source.read(contents, box))
                advance(source.num_bytes)
