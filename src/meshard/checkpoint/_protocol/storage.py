"""Where checkpoints are: a folder, or an object store.

``saving`` relies on two things: files are durable once ``close`` has returned, and ``publish``
makes a file appear whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
try:
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # it has no types
except ImportError:  # torch requires it, but does not need it to run
    url_to_fs = None


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded; nothing was changed, unless the text says so."""


LOCK = ".meshard-lock"  # the file in the folder of a run that the one who saves has locked


# --- a folder ------------------------------------------------------------------------------


def sync(path: Path) -> None:
    """Return when a file, or the names in a folder, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems sync no folders
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


class FolderStorage:
    """A folder on a file system that all ranks see. Paths are relative to it, with slashes."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)  # absolute, because the working directory may change
        self._path = Path(self.root)
        self._unlock: Callable[[], object] | None = None

    def lock(self) -> None:
        """Keep others from saving here until ``unlock``, or until this object or process ends.

        Raises:
            CheckpointError: Another one saves here.
        """
        if fcntl is None or self._unlock is not None:
            return
        self._make_root()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        descriptor = os.open(self._path / LOCK, flags, 0o666)
        closing = weakref.finalize(self, os.close, descriptor)  # which frees the lock
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = (
                os.pread(descriptor, 1000, 0).decode()
                or "a process that has not written its name yet"
            )
            closing()
            raise CheckpointError(
                f"another job is saving into {self.root}: {who}. Give each run a folder of its "
                "own; within one process, close() the other Checkpointer."
            ) from None
        except OSError:  # a file system without locks
            closing()
            return
        self._unlock = closing
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        who = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
        with contextlib.suppress(OSError):  # such as a full disk: the lock holds without a name
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, who.encode(), 0)
        # A forked process, of a data loader for example, has the open file too, and would keep the
        # lock after this process has ended.
        os.register_at_fork(after_in_child=closing)

    def unlock(self) -> None:
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    def _make_root(self) -> None:
        if not self._path.is_dir():
            self._path.mkdir(parents=True, exist_ok=True)
            self.act("sync", self._path.parent)

    def is_link(self, folder: str) -> bool:
        """Whether a folder is a link, so that what is in it belongs to another place."""
        return (self._path / folder).is_symlink()

    def folders(self) -> list[str]:
        """Return the names of the folders at the top, links to folders too."""
        if not self._path.is_dir():
            return []
        return sorted(entry.name for entry in os.scandir(self._path) if entry.is_dir())

    def files(self, folder: str) -> dict[str, int]:
        """Return the names of the files in a folder, with their sizes in bytes.

        A folder that is gone is empty: another process may remove it, such as ``prune`` by hand.
        """
        found = {}
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self._path / folder):
                with contextlib.suppress(FileNotFoundError):  # it was removed or renamed meanwhile
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
        return found

    def is_empty(self, folder: str) -> bool:
        """Whether nothing is in a folder, no folders either."""
        try:
            return not os.listdir(self._path / folder)
        except FileNotFoundError:
            return True

    def make_folder(self, folder: str) -> None:
        self._make_root()
        self.act("mkdir", self._path / folder)
        self.act("sync", self._path)

    def exists(self, path: str) -> bool:
        return (self._path / path).exists()

    def create(self, path: str) -> Any:
        """Open a new file with ``write`` and ``close``, which returns when power may be lost."""
        return _FileSink(self, self._path / path)

    def publish(self, path: str, data: bytes) -> None:
        """Make a file appear, whole or not at all; return when it is there for good."""
        target = self._path / path
        aside = target.with_name(target.name + ".unfinished")
        sink = _FileSink(self, aside)
        sink.write(data)
        sink.close()
        self.act("sync", target.parent)  # other files are durable before this one appears
        try:
            self.act("rename", aside, target)
        except FileNotFoundError:  # a network folder may say so of a rename that it has made
            if not target.exists() or target.read_bytes() != data:
                raise
        self.act("sync", target.parent)
        self.act("sync", self._path)

    def read(self, path: str) -> bytes:
        _check_regular(self._path / path)
        return (self._path / path).read_bytes()

    def open(self, path: str) -> Source:
        return _FileSource(self._path / path)

    def remove_file(self, path: str) -> None:
        self.act("unlink", self._path / path)
        with contextlib.suppress(FileNotFoundError):
            self.act("sync", (self._path / path).parent)

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with all that is in it."""
        names = self.files(folder)
        for name in sorted(names, reverse=True):  # reversed, so that the hidden marker comes last
            self.act("unlink", self._path / folder / name)
        shutil.rmtree(self._path / folder, ignore_errors=True)
        self.act("sync", self._path)

    def act(self, what: str, path: Path, to: Path | None = None) -> None:
        """Change the folder, for the tests of kills. Writes and ``rmtree`` are elsewhere."""
        if what == "mkdir":
            path.mkdir()
        elif what == "unlink":
            path.unlink(missing_ok=True)
        elif what == "rename":
            assert to is not None
            os.replace(path, to)
        else:
            sync(path)

    def write(self, file: Any, data: bytes | memoryview) -> None:
        file.write(data)


_SYNCED_AT_ONCE = 2**25  # bytes


class _FileSink:
    """A file that is synced when it is closed.

    A thread syncs what there is of a large file already, while the next bytes are made: Linux
    begins to write much later, and the disk would be idle until then.
    """

    def __init__(self, storage: FolderStorage, path: Path) -> None:
        self._storage, self._path = storage, path
        self._file = open(path, "xb", buffering=2**20)  # noqa: SIM115  # closed by close()
        self._num_new = 0  # bytes since the last sync began
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None  # an error of the disk is reported once

    def write(self, data: bytes | memoryview) -> None:
        self._storage.write(self._file, data)
        self._num_new += len(data)
        if self._num_new >= _SYNCED_AT_ONCE and not (self._thread and self._thread.is_alive()):
            self._num_new = 0
            self._thread = threading.Thread(target=self._sync, name="meshard sync")
            self._thread.start()

    def _sync(self) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._error = error

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()
        with self._file:
            self._file.flush()
        if self._error is not None:
            raise self._error
        self._storage.act("sync", self._path)


class Source:
    """A file that is read at any place."""

    def read(self, begin: int, size: int) -> bytes:
        data = bytearray(size)
        self.read_into(memoryview(data), begin)
        return bytes(data)

    def read_into(self, memory: memoryview, begin: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class _FileSource(Source):
    def __init__(self, path: Path) -> None:
        self._path = path
        _check_regular(path)
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  # closed by close()

    def read_into(self, memory: memoryview, begin: int) -> None:
        _read_at(self._file.fileno(), memory, begin, self._path.name)

    def close(self) -> None:
        self._file.close()


def _check_regular(path: Path) -> None:
    """Raise if a path is such as a pipe, which would wait for a writer when it is opened."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"{path} is no ordinary file")


def _read_at(descriptor: int, memory: memoryview, begin: int, name: str) -> None:
    done = 0
    while done < len(memory):  # one call reads at most 2 GiB
        count = os.preadv(descriptor, [memory[done:]], begin + done)
        if not count:
            raise EOFError(f"{name} ends before byte {begin + len(memory)}")
        done += count


# --- an object store -----------------------------------------------------------------------


class ObjectStorage:
    """A store of objects, through fsspec. An object appears whole when it is closed."""

    def __init__(self, url: str) -> None:
        if url_to_fs is None:
            raise ImportError(
                f"{url}: checkpoints on an object store need fsspec, and the package of its file "
                "system (s3fs for s3://, gcsfs for gs://): pip install fsspec s3fs."
            )
        self.root = url
        self._fs: Any
        # No cached listings, because another process may be writing.
        self._fs, path = url_to_fs(url, use_listings_cache=False)
        self._path = path.rstrip("/")

    def lock(self) -> None:
        """A store has no locks."""

    def unlock(self) -> None:
        pass

    def is_link(self, folder: str) -> bool:
        return False

    def _at(self, path: str) -> str:
        return f"{self._path}/{path}"

    def folders(self) -> list[str]:
        entries = self._entries("")
        found = [each["name"] for each in entries if each["type"] == "directory"]
        return sorted(name.rstrip("/").rsplit("/", 1)[-1] for name in found)

    def _entries(self, folder: str) -> list[Any]:
        self._fs.invalidate_cache()
        try:
            return list(self._fs.ls(self._at(folder).rstrip("/"), detail=True))
        except FileNotFoundError:
            return []

    def files(self, folder: str) -> dict[str, int]:
        entries = self._entries(folder)
        found = (each for each in entries if each["type"] == "file")
        return {each["name"].rsplit("/", 1)[-1]: each["size"] for each in found}

    def is_empty(self, folder: str) -> bool:
        return not self._entries(folder)

    def make_folder(self, folder: str) -> None:
        """A store has no folders of its own; a file system behind fsspec may have."""
        self._fs.makedirs(self._at(folder), exist_ok=True)

    def exists(self, path: str) -> bool:
        self._fs.invalidate_cache()
        try:
            self._fs.info(self._at(path))
        except FileNotFoundError:  # any other error is no answer, and ``fs.exists`` takes it for no
            return False
        return True

    def create(self, path: str) -> Any:
        return self._fs.open(self._at(path), "wb")

    def publish(self, path: str, data: bytes) -> None:
        self._fs.pipe_file(self._at(path), data)

    def read(self, path: str) -> bytes:
        data: bytes = self._fs.cat_file(self._at(path))
        return data

    def open(self, path: str) -> Source:
        return _ObjectSource(self._fs, self._at(path))

    def remove_file(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._at(path))

    def remove_folder(self, folder: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            names = [name for name in self.files(folder) if not name.startswith(".")]
            if names:  # the hidden marker comes last: without it the rest would stay for good
                self._fs.rm([f"{self._at(folder)}/{name}" for name in names])
            self._fs.rm(self._at(folder), recursive=True)


class _ObjectSource(Source):
    """An object. It is fetched in blocks that are kept in a local file, so that each comes once."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        self._copy: Any = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        self._fetched = set[int]()

    def read_into(self, memory: memoryview, begin: int) -> None:
        end = begin + len(memory)
        for block in range(begin // _BLOCK, -(-end // _BLOCK)):
            if block not in self._fetched:
                at = block * _BLOCK
                data = self._fs.cat_file(self._path, start=at, end=at + _BLOCK)
                os.pwrite(self._copy.fileno(), data, at)
                self._fetched.add(block)
        _read_at(self._copy.fileno(), memory, begin, self._path.rsplit("/", 1)[-1])

    def close(self) -> None:
        self._copy.close()


_BLOCK = 2**25  # bytes of one request; they are held in memory


Storage = FolderStorage | ObjectStorage


def storage_at(folder: str | os.PathLike[str]) -> Storage:
    """Return the storage for a path, or for a URL such as ``s3://bucket/run``."""
    text = os.fspath(folder)
    if "://" in text and not text.startswith("file://"):
        return ObjectStorage(text)
    return FolderStorage(text.removeprefix("file://"))
