"""Checkpoints of a training run, in a folder or an object store."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from meshard._torch.user_line import warn_user
from meshard.checkpoint._protocol import dcp_format, manifest, parts
from meshard.checkpoint._protocol.jobs import Job, job_of
from meshard.checkpoint._protocol.loading import Damage, Reader, agree, damages
from meshard.checkpoint._protocol.manifest import CheckpointError, Manifest, StepFolder
from meshard.checkpoint._protocol.ranks import Ranks
from meshard.checkpoint._protocol.restoring import Loaded, Options, Restoring
from meshard.checkpoint._protocol.saving import Saver
from meshard.checkpoint._protocol.staging import Staging
from meshard.checkpoint._protocol.storage import Storage, storage_at


class SaveHandle:
    """A save in the background."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        # Not a daemon, so that a normal end of the process waits for it.
        self._thread = threading.Thread(target=self._run, args=(run,), name="meshard.checkpoint")
        self._thread.start()

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Warning as warning:  # under ``-W error``; the checkpoint is committed on all ranks
            print(f"meshard: {warning}", file=sys.stderr, flush=True)
        except BaseException as error:
            self._error = error
            # Printed too, because the process may end before a call raises it.
            print(f"meshard: a checkpoint was not saved: {error}", file=sys.stderr, flush=True)

    def done(self) -> bool:
        """Whether the save is over, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the save is committed.

        Raises:
            CheckpointError: It failed, on any rank. The next ``save``, ``async_save``, ``load`` or
                ``wait`` of the ``Checkpointer`` raises it too.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error


class Checkpointer:
    """Saves and loads checkpoints of one run.

    Each step has a folder of its own, ``step-100``, which counts once its manifest is there: a save
    that is killed at any moment leaves the checkpoints before it, and the next save goes on. Every
    byte has a checksum. A checkpoint loads on any number of ranks, any mesh and any supported
    torch, and into ``fully_shard``, ``replicate`` and plain modules alike.

    Args:
        folder: A path that all ranks see, or a URL for fsspec (``s3://bucket/run``).
        keep: The number of newest checkpoints that stay; None: all.
        keep_every: Checkpoints whose step is a multiple of it stay as well.
        process_group: The ranks that save and load together; None: the default group.

    Raises:
        ValueError: ``keep`` or ``keep_every`` is less than 1.

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
        keep: int | None = 3,
        keep_every: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        for name, value in (("keep", keep), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {value}.")
        self._storage: Storage = storage_at(folder)
        self._keep, self._keep_every = keep, keep_every
        self._process_group = process_group
        self._saver: Saver | None = None  # made by the first save or load: that is collective
        self._world: object = None  # the default group when ``_saver`` was made
        self._staging = Staging()
        self._running: SaveHandle | None = None
        self._removal: threading.Thread | None = None  # removes old checkpoints

    # --- save ------------------------------------------------------------------------------

    def save(
        self, step: int, model: nn.Module, optimizer: Optimizer | None = None, **extra: Any
    ) -> None:
        """Save a checkpoint, and return when it is committed on all ranks.

        A step that is there already is replaced, once the new one is committed.
        **Collective:** all ranks, with the same step and names.

        Args:
            step: A number that is not negative.
            model: Any module; sharded, replicated or plain.
            optimizer: Any optimizer whose parameters are in ``model``.
            **extra: What has ``state_dict`` and ``load_state_dict`` (schedulers, a
                ``ShardedGradScaler``, data loaders, further modules and optimizers), tensors, and
                plain values. What differs between ranks is kept for each rank.

        Raises:
            CheckpointError: On all ranks: gradients are pending, something is not plain, experts on
                meshes of their own have one name, no space is left, the ranks do not see one
                folder. The checkpoints before are as they were.
        """
        self.wait()
        saver, job = self._collective(), self._job(step, model, optimizer, extra)
        saver.write(job, saver.agree(job), lambda: self._tidy(step))

    def async_save(
        self, step: int, model: nn.Module, optimizer: Optimizer | None = None, **extra: Any
    ) -> SaveHandle:
        """Copy what is to be saved to host memory, and save it in the background.

        Each rank copies what it writes. The host memory is kept for the next save. One save runs at
        a time: the next call of ``save``, ``async_save`` or ``load``, and the end of the process,
        wait for this one. What is refused is raised here, as by ``save``; what goes wrong later is
        raised by ``wait()`` of the handle, and by the next call. Call it before
        ``torch.distributed.destroy_process_group``.
        **Collective:** all ranks. Arguments and errors are those of ``save``.
        """
        self.wait()
        saver, job = self._collective(), self._job(step, model, optimizer, extra)
        agreed = saver.agree(job)
        try:
            job.sources = self._staging.copy(job.sources)
        except Exception as error:  # such as a lack of host memory; other ranks must know
            job.problem = f"rank {saver.ranks.rank}: {error}"
        self._running = SaveHandle(lambda: saver.write(job, agreed, lambda: self._tidy(step)))
        return self._running

    def _tidy(self, step: int) -> None:
        """Begin to remove old checkpoints. The first rank calls it after each commit."""
        try:
            newest = self.latest_step()
            doomed = self._withdraw(step)
        except Exception as error:  # not raised, because the checkpoint is committed
            self._warn_of(error)
            return
        if doomed:
            # In a thread, because a file system takes long to free large files.
            self._removal = threading.Thread(target=self._remove, args=(doomed,))
            self._removal.start()
        if newest is not None and newest > step:
            warn_user(
                f"step {step} was saved beside step {newest}, which load() takes for the newest "
                f"one; if that is of an abandoned run, remove its folder in {self._storage.root}.",
            )

    def _remove(self, folders: list[StepFolder]) -> None:
        try:
            for folder in folders:
                self._storage.remove_folder(folder.name)
        except Exception as error:
            self._warn_of(error)

    def _warn_of(self, error: Exception) -> None:
        warn_user(
            f"old checkpoints in {self._storage.root} could not be removed: {error}; the next save "
            "tries again.",
        )

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

    def _collective(self) -> Saver:
        world = dist.group.WORLD if dist.is_initialized() else None
        if self._saver is None or self._world is not world:  # the group is another one now
            self._saver = Saver(self._storage, Ranks.of(self._process_group))
            self._world = world
        return self._saver

    def _job(
        self, step: int, model: nn.Module, optimizer: Optimizer | None, extra: dict[str, Any]
    ) -> Job:
        """Return what this rank is to write. If that fails, the job tells the other ranks why."""
        try:
            parts.check_names(extra)
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise ValueError(f"step must be an integer that is not negative, got {step!r}.")
            return job_of(step, model, optimizer, extra)
        except Exception as error:  # whatever it is
            rank = self._collective().ranks.rank
            return Job(step if type(step) is int else -1, problem=f"rank {rank}: {error}")

    def prune(self) -> list[int]:
        """Remove checkpoints that are not to be kept, and return their steps.

        Every save does so by itself. Call it on one rank.
        """
        superfluous = self._superfluous(manifest.committed(self._storage))
        for folder in self._withdraw(None):
            self._storage.remove_folder(folder.name)
        return sorted(superfluous)

    def _withdraw(self, just_saved: int | None) -> list[StepFolder]:
        """Remove the manifests of checkpoints that are not to be kept; return their folders.

        A folder without a manifest is no checkpoint. So if the removal is killed, what is left of a
        folder does not count as one.
        """
        found = manifest.finished(self._storage)
        newest = {each.step: each for each in found}
        superfluous = self._superfluous(newest) - {just_saved}
        folders = [each for each in found if each != newest[each.step] or each.step in superfluous]
        for folder in folders:
            self._storage.remove_file(folder.manifest)
        return folders

    def _superfluous(self, newest: dict[int, StepFolder]) -> set[int]:
        if self._keep is None:
            return set()
        old = sorted(newest)[: -self._keep]
        return {step for step in old if not (self._keep_every and step % self._keep_every == 0)}

    # --- what is there ---------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps that are committed, in order. Any rank may ask alone."""
        return list(manifest.committed(self._storage))

    def latest_step(self) -> int | None:
        """Return the newest step that is committed; None if there is none.

        Any rank may ask alone, also while another process saves. Ranks that must agree let ``load``
        find it.
        """
        return max(self.steps(), default=None)

    def manifest(self, step: int | None = None) -> Manifest:
        """Return what is in a checkpoint; None: the newest. Any rank may ask alone.

        Raises:
            CheckpointError: There is none, or its manifest is damaged.
        """
        return manifest.read_manifest(self._storage, self._folder_of(step))

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
            found = manifest.read_manifest(self._storage, folder)
        except CheckpointError as error:
            return [Damage(manifest.NAME, str(error))]
        reader = Reader(self._storage, folder.name, found)
        with contextlib.closing(reader):
            wrong = []
            for num_bytes, damage in damages(reader, self._storage.files(folder.name)):
                if progress is not None:
                    progress(num_bytes)
                if damage is not None:
                    wrong.append(damage)
        return wrong

    @contextlib.contextmanager
    def reader(self, step: int | None = None) -> Iterator[Reader]:
        """Open a checkpoint to read from it by hand. Any rank may do so alone."""
        folder = self._folder_of(step)
        found = manifest.read_manifest(self._storage, folder)
        with contextlib.closing(Reader(self._storage, folder.name, found)) as reader:
            yield reader

    def _folder_of(self, step: int | None) -> StepFolder:
        found = manifest.committed(self._storage)
        if not found:
            raise CheckpointError(f"there is no checkpoint in {self._storage.root}.")
        if step is not None and step not in found:
            raise CheckpointError(
                f"step {step} is not in {self._storage.root}; there are {sorted(found)}."
            )
        return found[max(found) if step is None else step]

    # --- load ------------------------------------------------------------------------------

    def load(
        self,
        model: nn.Module,
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
            model: Any module. One on the meta device is to be materialised first (``to_empty``).
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
        self.wait()
        ranks = self._collective().ranks
        folder, found = self._find(ranks, step)
        reader = Reader(self._storage, folder, found)
        with contextlib.closing(reader):
            where = f"{self._storage.root}/{folder}".rstrip("/")
            options = Options(strict, cast, verify)
            return Restoring(ranks, reader, where, options).run(model, optimizer, extra)

    def _folder_to_load(self, step: int | None) -> StepFolder | str:
        """Return the folder of a step, or "" if this is a folder of torch."""
        try:
            return self._folder_of(step)
        except CheckpointError:
            if self._storage.exists(manifest.MARKER):
                raise CheckpointError(
                    f"{self._storage.root} is the folder of one step; pass the folder that it "
                    "is in to Checkpointer, and the step to load()."
                ) from None
            if step is None and self._storage.exists(dcp_format.METADATA):
                return ""
            raise

    def _find(self, ranks: Ranks, step: int | None) -> tuple[str, Manifest]:
        """Return the folder that the first rank has found, and its manifest."""
        said: dict[str, Any] = {"problem": "", "folder": None}
        if ranks.is_first:
            try:
                said["folder"] = self._folder_to_load(step)
            except Exception as error:  # such as one of the store; other ranks must know
                said["problem"] = str(error)
        said = ranks.broadcast(said)
        if said["problem"]:
            raise CheckpointError(said["problem"])
        problems: list[str] = []
        folder, found = "", None
        try:
            if said["folder"] == "":
                found = dcp_format.read_folder(self._storage)
            else:
                step_folder = StepFolder(*said["folder"])
                folder = step_folder.name
                found = manifest.read_manifest(self._storage, step_folder)
        except Exception as error:
            problems.append(f"rank {ranks.rank}: {error}")
        agree(ranks, problems, f"the checkpoint {folder} in {self._storage.root} cannot be read:")
        assert found is not None
        return folder, found
