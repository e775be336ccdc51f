"""Weights in the files of Hugging Face: written by all ranks, read by each rank in part."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from meshard._engine.unit import own_class
from meshard._torch.user_line import listed, warn_user
from meshard.checkpoint import weights_files
from meshard.checkpoint.progress import log_summary, progress_bar
from meshard.checkpoint.weights_files import FilePlan, StoredTensor
from meshard.checkpoint.weights_gather import (
    Agreement,
    check_dtype,
    gather_to_each,
    readable_weights,
)
from meshard.checkpoint.weights_layout import (
    Weight,
    held_tensors,
    own_rank,
    weights_of,
    without_wrappers,
)
from meshard.checkpoint.weights_meta import computed_buffers, leave_meta_device

_ASIDE = ".saving"  # the folder in a folder where files are until they are renamed

# --- save_pretrained -------------------------------------------------------------------------


def save_pretrained(
    module: nn.Module,
    folder: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    *,
    dtype: torch.dtype | None = None,
    extra_files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    progress: bool | None = None,
) -> None:
    """Write the weights of ``module`` as safetensors, which ``from_pretrained`` reads.

    The folder gets ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and their index,
    with what ``state_dict()`` has, and of a module with a ``config`` (and ``generation_config``)
    these too. Tied parameters are written once, under their first name. The module stays as it is.
    Of a module in ``torch.compile``, DDP or ``AveragedModel``, the inner one is written. A line of
    the logger "meshard", of level INFO, has bytes, seconds and files.

    **Collective:** every rank of the module's meshes. Each writes whole files, which are gathered
    to it in parts of 64 MiB. It holds one of these and one tensor made of them (while it is
    gathered, on n ranks an n-th part to send, and with gloo a second copy). More and smaller files
    keep more ranks busy.

    **A save that is killed, at any moment, leaves the old weights or the new ones whole**, also
    where power is lost. Files are written inside of ``.saving``, synced, and renamed when all are
    complete, to names that no old file has (several files beside as many old ones are called
    ``model-2-00001-of-0000N.safetensors``). Then the new index or the new single file takes its
    place. Only then the old files are removed. Where one file follows several, or several one,
    some readers find the old weights until the old single file or index is removed, right after.
    The configuration and the extra files are replaced right before the weights, each by itself: a
    kill in between leaves new ones beside old weights.
    An error on any rank is raised on all, and leaves the folder as it was, unless it is one of
    renaming.

    Args:
        module: A module with or without units, between steps.
        folder: Where to write. It is made, and must be the same one on all ranks.
        max_shard_size: Of a file, as bytes or a text: "5GB" is 5 * 10**9, "1GiB" 2**30. A larger
            tensor has a file of its own.
        dtype: Cast floating-point tensors to it. Those of eight bits stay as they are: they would
            lose their scales.
        extra_files: Files, or folders, whose files are copied beside the weights by the first
            rank, but for hidden ones and for weights: tokenizer, chat templates. The folder of the
            original model will do. The module's own ``config`` replaces theirs.
        progress: A progress bar on the first rank; None: if its stderr is a terminal.

    Raises:
        FileNotFoundError: One of ``extra_files`` is not there.
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
    began = time.perf_counter()
    module, aside = without_wrappers(module), Path(folder) / _ASIDE
    agreement = Agreement(module, "save_pretrained")
    weights = readable_weights(module, agreement, by_one=True)
    if hasattr(module, "get_base_model") or any(".base_layer." in each.fqn for each in weights):
        raise ValueError(
            f"save_pretrained got a {own_class(module).__name__} with adapters of PEFT; save these "
            "by PEFT's own method (docs/how-to/peft.md), or merge them first "
            "(docs/how-to/weights.md, 'Merge adapters')."
        )
    first_of_ties = {id(weight.tensor): weight for weight in reversed(weights)}
    unique = [weight for weight in weights if first_of_ties[id(weight.tensor)] is weight]
    files = weights_files.plan_files(unique, weights_files.parse_size(max_shard_size), dtype)
    total, is_first = sum(file.num_bytes for file in files), agreement.is_first
    with progress_bar("saving", total, wanted=progress, is_first_rank=is_first) as advance:
        try:
            with agreement.agreed():
                if is_first:
                    shutil.rmtree(aside, ignore_errors=True)  # left by a save that was killed
                    aside.mkdir(parents=True)
                    for path in weights_files.extra_paths(extra_files):
                        shutil.copyfile(path, aside / path.name)
                    _write_configs(module, aside, dtype)
            for begin in range(0, len(files), len(agreement.ranks)):
                some = files[begin : begin + len(agreement.ranks)]
                _write_together(some, aside, agreement, advance)
            with agreement.agreed():
                if is_first:
                    weights_files.commit(aside, files)
        finally:
            if is_first:
                shutil.rmtree(aside, ignore_errors=True)
    if is_first:
        log_summary(f"saved {folder}", total, len(files), began)


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
    generation: Any = getattr(module, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)


def _write_together(
    files: list[FilePlan], aside: Path, agreement: Agreement, advance: Callable[[int], None]
) -> None:
    """Write one file on each of the first ranks. **Collective.**"""
    own = dict(zip(agreement.ranks, files, strict=False)).get(own_rank())
    with contextlib.ExitStack() as stack:
        with agreement.agreed():
            if own is not None:
                header = own.header()
                output = stack.enter_context(open(aside / own.name, "wb"))
                output.write(header)
        lists = [file.weights for file in files]
        for tensors, num_bytes in gather_to_each(lists, files[0].dtype, agreement):
            with agreement.agreed():
                for _, tensor in tensors:
                    weights_files.write_tensor(output, tensor)
                    del tensor  # before the next one is made
            advance(num_bytes)
        with agreement.agreed():
            if own is not None:
                output.flush()
                os.fsync(output.fileno())


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
    began = time.perf_counter()
    module = without_wrappers(module)
    agreement = Agreement(module, "load_pretrained")
    with agreement.agreed():
        weights = weights_of(module, "load_pretrained")
        files = weights_files.stored_tensors(Path(path))
        chosen, report = _chosen(module, weights, _renamed(files, rename), strict=strict)
        buffers = computed_buffers(module)
        total, is_first = sum(each.num_bytes for each in chosen.values()), agreement.is_first
    # Compare the files and not what is read, because ranks with different experts read different
    # tensors.
    rows = [f"{name} {each.shape} {each.dtype_name}" for name, each in sorted(files.items())]
    if not all(agreement.are_same([zlib.crc32("\n".join(rows).encode())])):
        raise ValueError(
            f"the ranks see different files at {path}: other names, shapes or dtypes. It must be "
            "the same on all ranks."
        )
    with (
        progress_bar("loading", total, wanted=progress, is_first_rank=is_first) as advance,
        agreement.agreed(),
    ):
        try:
            leave_meta_device(module, agreement.device or torch.get_default_device(), buffers)
            _fill(weights_of(module, "load_pretrained"), chosen, advance)
        except Exception as error:
            raise RuntimeError(
                f"load_pretrained failed while it was reading, after everything had been checked "
                f"({error}); the module is filled in part. Load it again."
            ) from error
    if is_first:
        num_files = len({each.path for each in chosen.values()})
        log_summary(f"loaded {path}", total, num_files, began)
        if report.missing and report.unexpected:
            warn_user(
                f"load_pretrained left {listed(report.missing)} as before, and did not read "
                f"{listed(report.unexpected)}. If these are the same weights under other names, "
                "pass rename=. A function may return None there for what is not to be read."
            )
    return report


def _renamed(files: dict[str, StoredTensor], rename: Rename | None) -> dict[str, StoredTensor]:
    """Return the stored tensors by their names in the module."""
    found: dict[str, StoredTensor] = {}
    for name, stored in files.items():
        fqn = rename(name) if callable(rename) else _replaced(name, rename or {})
        if fqn in found:
            raise ValueError(f"rename gives {name!r} and {found[fqn].name!r} one name, {fqn!r}.")
        if fqn is not None:
            found[fqn] = stored
    return found


def _replaced(name: str, patterns: Mapping[str, str]) -> str:
    for pattern, replacement in patterns.items():
        if re.search(pattern, name):
            return re.sub(pattern, replacement, name)
    return name


def _chosen(
    module: nn.Module, weights: list[Weight], stored: dict[str, StoredTensor], *, strict: bool
) -> tuple[dict[str, StoredTensor], LoadReport]:
    """Return what is to be read, by fqn, one for each tensor of the module; or raise."""
    held = {id(tensor) for tensor in held_tensors(module)}
    names: dict[int, list[str]] = {}  # of each tensor that the files have
    for weight in weights:
        if id(weight.tensor) not in held:  # to write to it would change nothing
            raise NotImplementedError(
                f"{weight.fqn!r} is neither a parameter nor a buffer: a hook of state_dict() has "
                "made it, so it cannot be filled in place; use load_state_dict."
            )
        if weight.fqn in stored:
            names.setdefault(id(weight.tensor), []).append(weight.fqn)
    chosen = {}
    for weight in weights:
        if names.get(id(weight.tensor), [""])[0] == weight.fqn:
            chosen[weight.fqn] = stored[weight.fqn]
            _check_fits(weight, stored[weight.fqn])
    loaded = [weight.fqn for weight in weights if id(weight.tensor) in names]
    missing = [weight.fqn for weight in weights if id(weight.tensor) not in names]
    own = {*loaded, *missing}
    unexpected = [each.name for fqn, each in stored.items() if fqn not in own]
    if strict and (missing or unexpected):
        raise ValueError(
            f"the names do not fit: missing {listed(missing) or 'none'}; unexpected "
            f"{listed(unexpected) or 'none'}. Pass rename=, which maps names in the files to "
            "names in the module, or strict=False. If transformers itself changes these weights "
            "when it loads them, as it stacks experts, rewrite the files once: "
            "save_pretrained(Model.from_pretrained(old), new)."
        )
    without = [w.fqn for w in weights if w.local.is_meta and id(w.tensor) not in names]
    if without:
        raise ValueError(
            f"{listed(without)} are on the meta device and not in the files, so they would have no "
            "values; call meshard.materialize(module) before load_pretrained."
        )
    return chosen, LoadReport(loaded, missing, unexpected)


def _check_fits(weight: Weight, stored: StoredTensor) -> None:
    is_castable = stored.dtype == weight.dtype or _kind(stored.dtype) == _kind(weight.dtype)
    if stored.shape != weight.shape or not is_castable:
        raise ValueError(
            f"{weight.fqn!r} is {weight.dtype} of shape {weight.shape} in the module, and "
            f"{stored.dtype} of shape {stored.shape} in {stored.path} (as {stored.name!r}); only "
            "floating-point dtypes of 16 bits or more are cast to each other, and integers."
        )


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "floating" if dtype.itemsize > 1 else str(dtype)
    return "complex" if dtype.is_complex else "bool" if dtype == torch.bool else "integer"


@torch.no_grad()
def _fill(
    weights: list[Weight], chosen: dict[str, StoredTensor], advance: Callable[[int], None]
) -> None:
    """Read this rank's boxes into its local tensors."""
    wanted = [weight for weight in weights if weight.fqn in chosen]

    def path_of(weight: Weight) -> Path:
        return chosen[weight.fqn].path

    for path, of_file in itertools.groupby(sorted(wanted, key=path_of), path_of):
        with weights_files.opened(path) as contents:
            for weight in of_file:
                stored, box = chosen[weight.fqn], weight.own_box
                if box.numel:
                    weight.local.copy_(stored.read(contents, box))
                advance(stored.num_bytes)
