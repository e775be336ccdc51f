"""The line of the user's code on the call stack, for warnings."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import warnings
from pathlib import Path
from types import FrameType

import torch

_PACKAGES = (Path(__file__).parents[1], Path(torch.__file__).parent)
_NOT_THE_USERS = tuple(f"{folder}{os.sep}" for folder in _PACKAGES)
# Frames of these files lie between a context manager of ours and the ``with`` of the user.
_HELPERS = (contextlib.__file__,)
# Paths of Python, and of installed packages such as transformers: users cannot change their lines.
_PYTHON = (f"{sysconfig.get_path('stdlib')}{os.sep}", "<frozen ")
# Not full paths: a process may import from several such folders (its venv's, the user's, Debian's).
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame at or around ``frame`` that is in neither meshard nor torch.

    A frame of the user's program is preferred to one of Python or of an installed package.
    """
    installed = None
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_USERS) and file not in _HELPERS:
            if not file.startswith(_PYTHON) and not any(each in file for each in _INSTALLED):
                return frame
            installed = installed or frame
        frame = frame.f_back
    return installed


def warn_user(text: str) -> None:
    """Warn at the line of the user's code from which the present call came.

    On a thread of autograd there is no such line. The warning then points at the code that called
    ``warn_user``.
    """
    frame = user_frame(sys._getframe())
    if frame is None:
        warnings.warn(text, stacklevel=2)
        return
    warnings.warn_explicit(
        text,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def listed(names: list[str]) -> str:
    """Return the first three names and how many more there are, for an error."""
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
