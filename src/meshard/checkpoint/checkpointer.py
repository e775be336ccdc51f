"""Checkpoints of a training run, in a folder or an object store."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from typing_extensions import Self

from meshard._torch.user_line import warn_user
from meshard.checkpoint._protocol import commits, parts, torch_folder
from meshard.checkpoint._protocol.commits import Commit, Rule
from meshard.checkpoint._protocol.jobs import Job, job_of
from meshard.checkpoint._protocol.loading import Damage, Reader, damages, read_manifest
from meshard.checkpoint._protocol.manifest import Manifest
from meshard.checkpoint._protocol.ranks import Ranks
from meshard.checkpoint._protocol.restoring import Loaded, Options, Restoring
from meshard.checkpoint._protocol.saving import Saver
from meshard.checkpoint._protocol.staging import Staging
from meshard.checkpoint._protocol.storage import CheckpointError, Storage, storage_at
from meshard.checkpoint.progress import log_summary, progress_bar

# A module, or a state dict in its place.
Model = nn.Module | dict[str, Any]


class SaveHandle:
    """A save in the background."""

    def __init__(self, run: Callable[[], None] | None) -> None:
        self._error: BaseException | None = None
        self._run = run
        # Not a daemon, so that a normal end of the process waits for it.
        self._thread = threading.Thread(target=self._save, name="meshard.checkpoint")
        if run is not None:
            self._thread.start()

    def _save(self) -> None:
        assert self._run is not None
        try:
            self._run()
        except Warning as warning:  # under ``-W error``; the checkpoint is committed on all ranks
            print(f"meshard: {warning}", file=sys.stderr, flush=True)
        except BaseException as error:
            self._error = error
            # Printed too, because the process may end before a call raises it.
            print(f"meshard: a checkpoint was not saved: {error}", file=sys.stderr, flush=True)
        finally:
            self._run = None

    def done(self) -> bool:
        """Whether the save is over, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the save is committed.

        Raises:
            CheckpointError: It failed, on any rank. Unless this is called on all ranks, the next
                ``save``, ``async_save`` or ``load`` raises it too, on all.
        """
        if self._run is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


class Checkpointer:
    """Saves and loads checkpoints of one run.

    Each step has a folder of its own, ``step-100``, which counts once its manifest is there: a save
    that is killed at any moment leaves the checkpoints before it, and the next save goes on. Every
    byte has a checksum. A checkpoint loads on any number of ranks, any mesh and any supported
    torch, and into ``fully_shard``, ``replicate`` and plain modules alike.

    The first save locks the folder, until ``close()``, or until this object or the process ends:
    two jobs that save into one folder would remove each other's checkpoints. (Object stores, and
    file systems without locks, do not tell.) It may be used in a ``with`` block.

    Args:
        folder: A path that all ranks see, or a URL for fsspec (``s3://bucket/run``).
        keep: The number of newest checkpoints that stay; None: all, and nothing is ever removed.
        keep_every: With ``keep``, checkpoints whose step is a multiple of it stay as well.
        keep_best: With ``keep``, so many with the best ``metric`` stay as well.
        best: Which metrics are best: "min" (such as losses) or "max".
        save_every: Steps that are no multiple of it are skipped by ``save`` and ``async_save``,
            unless they are told ``force=True``.
        process_group: The ranks that save and load together; None: the default group.
        progress: Progress bars of ``save`` and ``load`` on the first rank; None: if its stderr is a
            terminal and tqdm is installed.

    Raises:
        ValueError: A number is less than 1, or has no meaning without ``keep``.

    >>> import tempfile, torch, meshard
    >>> from meshard.checkpoint import Checkpointer
    >>> model = meshard.fully_shard(torch.nn.Linear(2, 2))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> checkpointer = Checkpointer(tempfile.mkdtemp())
    >>> checkpointer.save(100, model, optimizer, tokens=25_600)
    >>> checkpointer.latest_step()
    100
    >>> checkpointer.load(model, optimizer).extra
    {'tokens': 25600}
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        best: str = "min",
        save_every: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        progress: bool | None = None,
    ) -> None:
        numbers = {
            "keep": keep, "keep_every": keep_every, "keep_best": keep_best,
            "save_every": save_every,
        }  # fmt: skip
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {value}.")
            if value is not None and keep is None and name != "save_every":
                raise ValueError(f"{name}= says what stays beside the newest ones; pass keep= too.")
        if best not in ("min", "max"):
            raise ValueError(f"best must be 'min' or 'max', got {best!r}.")
        with progress_bar("", 0, wanted=progress, is_first_rank=False):
            pass  # raises now, and not on one rank of a save, if tqdm is missing
        self._storage: Storage = storage_at(folder)
        self._rule = Rule(keep, keep_every, keep_best, best == "max")
        self._save_every = save_every
        self._process_group = process_group
        self._progress = progress
        self._saver: Saver | None = None  # made by the first save or load: that is collective
        self._world: object = None  # the default group when ``_saver`` was made
        self._staging = Staging()
        self._running: SaveHandle | None = None
        self._removal: threading.Thread | None = None  # removes old checkpoints

    # --- save ------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        model: Model,
        optimizer: Optimizer | None = None,
        *,
        metric: float | None = None,
        per_rank: bool = False,
        force: bool = False,
        **extra: Any,
    ) -> None:
        """Save a checkpoint, and return when it is committed on all ranks.

        A step that is there already is replaced, once the new one is committed.
        **Collective:** all ranks, with the same step and names.

        Args:
            step: A number that is not negative.
            model: Any module; sharded, replicated or plain. Or a state dict.
            optimizer: Any optimizer whose parameters are in ``model``.
            metric: How good the step is, for ``keep_best``; the first rank's counts.
            per_rank: Whether ordinary tensors of the model and states of the optimizer that differ
                between ranks are saved by each rank, which gets its own back on as many ranks.
                Without it, such a buffer (statistics of a ``BatchNorm``) is saved from the first
                rank, with one warning, and such parameters and states are refused.
            force: Save though ``save_every`` would skip this step, as at the end of a run.
            **extra: What has ``state_dict`` and ``load_state_dict`` (schedulers, a
                ``ShardedGradScaler``, data loaders, further modules and optimizers), tensors, and
                plain values. What differs between ranks is kept for each rank.

        Raises:
            CheckpointError: On all ranks: gradients are pending, something is not plain, experts on
                meshes of their own have one name, a parameter or a state of an optimizer differs
                between ranks, no space is left, the ranks do not see one folder, another job saves
                into it, or the save before has failed. The checkpoints before are as they were.
        """
        found = self._begin(step, model, optimizer, metric, extra, per_rank=per_rank, force=force)
        if found is None:
            return
        (job, plan), saver = found, self._collective()
        total = sum(each.nbytes for each in job.sources.values())
        with self._bar(f"saving step {step}", total) as advance:
            saver.write(job, plan, self._tidy, advance)

    def async_save(
        self,
        step: int,
        model: Model,
        optimizer: Optimizer | None = None,
        *,
        metric: float | None = None,
        per_rank: bool = False,
        force: bool = False,
        **extra: Any,
    ) -> SaveHandle:
        """Copy what is to be saved to host memory, and save it in the background.

        Each rank copies what it writes, and ordinary tensors that it compares with those of other
        ranks. The host memory is kept for the next save. One save runs at a time: the next call of
        ``save``, ``async_save`` or ``load``, and the end of the process, wait for this one. What is
        refused is raised here, as by ``save``; what differs between ranks, or goes wrong later, is
        raised by ``wait()`` of the handle, or else by the next call. Call it before
        ``torch.distributed.destroy_process_group``.
        **Collective:** all ranks. Arguments and errors are those of ``save``.
        """
        found = self._begin(step, model, optimizer, metric, extra, per_rank=per_rank, force=force)
        if found is None:
            return SaveHandle(None)
        (job, plan), saver = found, self._collective()
        try:
            copies = self._staging.copy([*job.sources.values()])
            job.sources = dict(zip(job.sources, copies, strict=True))
        except Exception as error:  # such as a lack of host memory; other ranks must know
            job.failed = error
        self._running = SaveHandle(lambda: saver.write(job, plan, self._tidy))
        return self._running

    def _bar(self, title: str, num_bytes: int) -> Any:
        is_first = self._collective().ranks.is_first
        return progress_bar(title, num_bytes, wanted=self._progress, is_first_rank=is_first)

    def _tidy(self) -> None:
        """Begin to remove old checkpoints. The first rank calls it after each commit."""
        try:
            found = commits.committed(self._storage)
            doomed = commits.withdraw(self._storage, commits.superfluous(found, self._rule))
        except Exception as error:  # not raised, because the checkpoint is committed
            self._warn_of(error)
            return
        if doomed:
            # In a thread, because a file system takes long to free large files.
            self._removal = threading.Thread(target=self._remove, args=(doomed,))
            self._removal.start()

    def _remove(self, doomed: list[Commit]) -> None:
        try:
            for commit in doomed:
                self._storage.remove_folder(commit.folder)
        except Exception as error:
            self._warn_of(error)

    def _warn_of(self, error: Exception) -> None:
        warn_user(
            f"old checkpoints in {self._storage.root} could not be removed: {error}; the next save "
            "tries again.",
        )

    def _failed(self) -> CheckpointError | None:
        """Wait as ``wait`` does; return what went wrong, if this rank has not been told.

        It is raised in the next exchange, so on all ranks: if a rank that knows of it went on
        alone, the others would answer its exchanges one call too late.
        """
        try:
            self.wait()
        except Exception as error:
            return CheckpointError(f"the save before has failed: {error}")
        return None

    def wait(self) -> None:
        """Wait for what runs in the background: a save, of which this raises what went wrong."""
        running = self._running
        if running is not None:
            try:
                running.wait()
            finally:
                if running.done():  # not if the user has interrupted the wait: then it still runs
                    self._running = None
        if self._removal is not None:
            self._removal.join()
            self._removal = None

    def close(self) -> None:
        """Wait for what runs in the background, and let others save into the folder."""
        try:
            self.wait()
        finally:
            self._storage.unlock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _collective(self) -> Saver:
        world = dist.group.WORLD if dist.is_initialized() else None
        if self._saver is None or self._world is not world:  # the group is another one now
            self._storage.unlock()  # another rank may be the first one now
            self._saver = Saver(self._storage, Ranks.of(self._process_group))
            self._world = world
        return self._saver

    def _begin(
        self,
        step: int,
        model: Model,
        optimizer: Optimizer | None,
        metric: Any,
        extra: dict[str, Any],
        *,
        per_rank: bool,
        force: bool,
    ) -> tuple[Job, Any] | None:
        """Return what this rank is to write, and the plan; None if this step is to be skipped."""
        failed = self._failed()
        is_skipped = self._save_every is not None and not force and step % self._save_every != 0
        if is_skipped and failed is None:
            return None

        def make() -> Job:
            if failed is not None:
                raise failed
            parts.check_names(extra)
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise ValueError(f"step must be an integer that is not negative, got {step!r}.")
            job = job_of(step, model, optimizer, extra)
            job.metric = None if metric is None else float(metric)  # perhaps of a tensor
            job.per_rank = per_rank
            return job

        return self._collective().begin(step, make)

    def prune(self) -> list[int]:
        """Remove checkpoints that are not to be kept, and return their steps.

        Every save does so by itself. Call it on one rank.
        """
        return commits.prune(self._storage, self._rule)

    # --- what is there ---------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps that are committed, in order. Any rank may ask alone."""
        return sorted({commit.step for commit in commits.committed(self._storage)})

    def latest_step(self) -> int | None:
        """Return the step that was committed last; None if there is none.

        After a run has gone back to an older step, that need not be the highest one. Any rank may
        ask alone, also while another process saves. Ranks that must agree let ``load`` find it.
        """
        found = commits.committed(self._storage)
        return found[-1].step if found else None

    def manifest(self, step: int | None = None) -> Manifest:
        """Return what is in a checkpoint; None: the newest. Any rank may ask alone.

        Raises:
            CheckpointError: There is none, or its manifest is damaged.
        """
        return read_manifest(self._storage, self._folder_of(step))

    def verify(
        self, step: int | None = None, *, progress: Callable[[int], Any] | None = None
    ) -> list[Damage]:
        """Read a whole checkpoint, and return the files that are not as they were written.

        Any rank may ask alone. ``progress`` is called with numbers of bytes that were read.

        Raises:
            CheckpointError: There is no such step.
        """
        folder = self._folder_of(step)
        try:
            found = read_manifest(self._storage, folder)
        except (CheckpointError, OSError) as error:
            return [Damage(commits.NAME, str(error))]
        with contextlib.closing(Reader(self._storage, folder, found)) as reader:
            return damages(reader, progress or (lambda _: None))

    @contextlib.contextmanager
    def reader(self, step: int | None = None) -> Iterator[Reader]:
        """Open a checkpoint to read from it by hand. Any rank may do so alone."""
        folder = self._folder_of(step)
        found = read_manifest(self._storage, folder)
        with contextlib.closing(Reader(self._storage, folder, found)) as reader:
            yield reader

    def _folder_of(self, step: int | None) -> str:
        return commits.find(self._storage, step).folder

    # --- load ------------------------------------------------------------------------------

    def load(
        self,
        model: Model,
        optimizer: Optimizer | None = None,
        *,
        step: int | None = None,
        strict: bool = True,
        cast: bool = False,
        verify: bool = True,
        **extra: Any,
    ) -> Loaded:
        """Load a checkpoint, saved on any ranks and any mesh.

        Each rank reads the ranges that it holds. Names, shapes, dtypes and checksums are compared
        on all ranks before anything is changed. Random states are restored where there are as many
        ranks as in the save; elsewhere each rank gets a seed derived from the saved states.
        **Collective:** all ranks, with the same arguments.

        Args:
            model: Any module; one on the meta device is to be materialised first (``to_empty``). Or
                a state dict, whose tensors are filled.
            optimizer: Its state is created as it was saved. None: it is not loaded.
            step: None is the newest one. In a folder that ``torch.distributed.checkpoint.save`` has
                written there is only None.
            strict: Raise if something is missing or unexpected, instead of saying so in what is
                returned. Other parts than those that are given are not unexpected.
            cast: Convert what was saved in another dtype, where no value wraps around.
            verify: Compare checksums.
            **extra: Objects to load into, under the names that they were saved with: what has
                ``load_state_dict``, and tensors, also in lists and dicts. Plain values are
                returned in any case, those that differ between ranks on as many ranks only;
                elsewhere ``missing`` of what is returned names them. Tensors whose keys are the
                same when joined by dots cannot be told apart: load such a value as it is returned.

        Returns:
            The step, plain values, what did not fit, how random states were restored, and the names
            of what could not be read of a folder of torch.

        Raises:
            CheckpointError: On all ranks; nothing was changed, unless the text says so.
        """
        failed, began = self._failed(), time.perf_counter()
        ranks = self._collective().ranks

        def go_on() -> None:
            if failed is not None:
                raise failed

        # All ranks load what the first one finds.
        folder = ranks.together("nothing was loaded", go_on, lambda _: self._folder_to_load(step))
        what = f"the checkpoint {folder} in {self._storage.root} cannot be read"
        found = ranks.each(what, lambda: read_folder(self._storage, folder))
        reader = Reader(self._storage, folder, found)
        with contextlib.closing(reader):
            where = f"{self._storage.root}/{folder}".rstrip("/")
            with self._bar(f"loading {where}", found.num_bytes) as advance:
                options = Options(strict, cast, verify, advance)
                loaded = Restoring(ranks, reader, where, options).run(model, optimizer, extra)
            if ranks.is_first:
                log_summary(f"loaded {where}", found.num_bytes, len(found.files), began)
            return loaded

    def _folder_to_load(self, step: int | None) -> str:
        """Return the folder of a step, or "" if this is a folder of torch."""
        try:
            return self._folder_of(step)
        except CheckpointError:
            if self._storage.exists(commits.MARKER):
                raise CheckpointError(
                    f"{self._storage.root} is the folder of one step; pass the folder that it "
                    "is in to Checkpointer, and the step to load()."
                ) from None
            if step is None and self._storage.exists(torch_folder.METADATA):
                return ""
            raise


def read_folder(storage: Storage, folder: str) -> Manifest:
    """Return the manifest in the folder of a step; "": of a folder that torch has written."""
    return read_manifest(storage, folder) if folder else torch_folder.read_folder(storage)
