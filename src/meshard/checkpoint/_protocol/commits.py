"""The folders of a run: which of them are checkpoints, which is the newest, and which stay.

A folder with a manifest is a checkpoint; a folder without one is not. The manifest is JSON text
without spaces, with a checksum over the rest of the text, so that every changed byte is noticed.
Nothing here imports torch, so that ``python -m meshard.checkpoint list`` is quick.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from meshard.checkpoint._protocol.storage import CheckpointError, Storage

NAME = "manifest.json"
FORMAT = "meshard.checkpoint"
VERSION = 2  # of the format; a reader refuses a higher one
MARKER = ".meshard"  # marks folders of ours, others are never removed; has what ``Commit`` tells
_FOLDER = re.compile(r"step-(0|[1-9]\d*)(?:\.([1-9]\d*))?")


def canonical(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def checksum_of(text: bytes) -> str:
    return "sha256:" + hashlib.sha256(text).hexdigest()


def content_of(text: bytes, where: str) -> dict[str, Any]:
    """Return what is in the text of a manifest of any format, once its checksum was compared.

    Raises:
        CheckpointError: It is damaged, or of a newer format.
    """
    try:
        outer = json.loads(text)
        content, checksum = outer["content"], outer["checksum"]
        is_whole = canonical(outer) == text and checksum_of(canonical(content)) == checksum
    except (ValueError, KeyError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise CheckpointError(
            f"{where}/{NAME} is not as it was written: a part of it was changed or is missing. "
            "Load another step, or copy the file from where the checkpoint came from."
        )
    version = content.get("format_version") if isinstance(content, dict) else None
    if type(version) is not int or content.get("format") != FORMAT:
        raise CheckpointError(f"{where}/{NAME} is no manifest of meshard.checkpoint.")
    if version > VERSION:
        raise CheckpointError(
            f"{where}/{NAME} has format {version} of a newer meshard; this one reads up to format "
            f"{VERSION}. Update meshard."
        )
    return dict(content)


# --- folders -------------------------------------------------------------------------------


class Commit(NamedTuple):
    """The folder of one save. A step that is saved again gets another folder."""

    folder: str
    step: int
    number: int  # grows from save to save; 0: written before there were numbers
    metric: float | None = None

    @property
    def manifest(self) -> str:
        return f"{self.folder}/{NAME}"


def committed(storage: Storage) -> list[Commit]:
    """Return the checkpoints, the newest last: the one that was committed last."""
    found = [
        _commit_of(storage, folder, match)
        for folder in storage.folders()
        if (match := _FOLDER.fullmatch(folder)) and storage.exists(f"{folder}/{NAME}")
    ]
    return [commit for _, commit in sorted(found)]


def _commit_of(storage: Storage, folder: str, match: re.Match[str]) -> tuple[Any, Commit]:
    """Return a checkpoint, after what they are sorted by."""
    step, attempt = int(match[1]), int(match[2] or 0)
    try:
        said = json.loads(storage.read(f"{folder}/{MARKER}") or b"{}")
        number, metric = int(said.get("number", 0)), said.get("metric")
    except (FileNotFoundError, ValueError, TypeError, AttributeError, RecursionError):
        # It is damaged, or gone. What a store does not answer now is another matter, and raised:
        # the newest checkpoint must not be taken for the oldest one.
        number, metric = 0, None
    metric = metric if type(metric) is float and math.isfinite(metric) else None
    return (number, step, attempt), Commit(folder, step, number, metric)


def find(storage: Storage, step: int | None) -> Commit:
    """Return the checkpoint of a step; None: the newest.

    Raises:
        CheckpointError: There is none.
    """
    found = committed(storage)
    if not found:
        raise CheckpointError(f"there is no checkpoint in {storage.root}.")
    wanted = [commit for commit in found if step in (None, commit.step)]
    if not wanted:
        steps = sorted({commit.step for commit in found})
        raise CheckpointError(f"step {step} is not in {storage.root}; there are {steps}.")
    return wanted[-1]


def begin(storage: Storage, step: int, metric: float | None) -> Commit:
    """Make the folder of a new save, and remove what killed saves have left."""
    number, taken = 0, set[str]()
    for folder in storage.folders():
        match = _FOLDER.fullmatch(folder)
        if match is None:
            continue
        if _is_leftover(storage, folder):
            storage.remove_folder(folder)
            continue
        taken.add(folder)
        number = max(number, _commit_of(storage, folder, match)[1].number)
    name, attempt = f"step-{step}", 0
    while name in taken:
        attempt += 1
        name = f"step-{step}.{attempt}"
    commit = Commit(name, step, number + 1, metric)
    storage.make_folder(name)
    sink = storage.create(f"{name}/{MARKER}")
    sink.write(json.dumps({"number": commit.number, "metric": metric}).encode())
    sink.close()
    return commit


def _is_leftover(storage: Storage, folder: str) -> bool:
    """Whether a save or a removal that was killed has left a folder."""
    if storage.is_link(folder) or storage.exists(f"{folder}/{NAME}"):
        return False
    return storage.exists(f"{folder}/{MARKER}") or storage.is_empty(folder)


class Rule(NamedTuple):
    """Which checkpoints stay."""

    keep: int | None  # the newest; None: all
    every: int | None  # multiples of it stay as well
    best: int | None  # so many with the best metrics stay as well
    is_higher_better: bool


def superfluous(commits: list[Commit], rule: Rule) -> list[Commit]:
    """Return the checkpoints that need not stay, among them those whose step was saved again."""
    newest = {commit.step: commit for commit in commits}
    stay = set(newest.values())
    if rule.keep is not None:
        sign = -1 if rule.is_higher_better else 1
        rated = [
            (sign * each.metric, -each.number, each) for each in stay if each.metric is not None
        ]
        measured = [commit for _, _, commit in sorted(rated, key=lambda row: row[:2])]
        stay = {each for each in stay if rule.every and each.step % rule.every == 0}
        stay |= {*sorted(newest.values(), key=lambda each: each.number)[-rule.keep :]}
        stay |= {*measured[: rule.best or 0]}
    return [commit for commit in commits if commit not in stay]


def withdraw(storage: Storage, doomed: Iterable[Commit]) -> list[Commit]:
    """Remove the manifests of checkpoints; return those whose folders are to be removed next.

    If the removal is killed, what is left of a folder does not count as a checkpoint. What is a
    link belongs to another run, and stays.
    """
    own = [commit for commit in doomed if not storage.is_link(commit.folder)]
    for commit in own:
        storage.remove_file(commit.manifest)
    return own


def prune(storage: Storage, rule: Rule) -> list[int]:
    """Remove the checkpoints that need not stay; return their steps."""
    doomed = withdraw(storage, superfluous(committed(storage), rule))
    for commit in doomed:
        storage.remove_folder(commit.folder)
    return sorted({commit.step for commit in doomed} - {each.step for each in committed(storage)})
