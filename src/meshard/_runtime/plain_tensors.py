"""Which tensors stand for parameters that every rank keeps whole?

The parameters themselves: nothing is gathered, and nothing is given back. Only where the module
computes in another dtype than it keeps, a copy in that dtype takes their place during forward and
backward, like a gathered parameter does elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from meshard._comm.all_gather import GatherInFlight
from meshard._comm.communicator import DONE, Communicator, Rows
from meshard._comm.host_link import HostLink
from meshard._geometry.layout import FlatLayout
from meshard._params.home import Home
from meshard._params.marks import Mark, mark_as
from meshard._params.plain_param import PlainParam
from meshard._params.sharded_param import ShardedParam
from meshard._params.unsharded_storage import UnshardedStorage
from meshard._runtime.group_tensors import GradientHook, Place

_NOTHING = torch.empty(0)


def _accumulator_of(param: torch.Tensor) -> Any:
    """Return the node of autograd that adds to ``.grad``."""
    with torch.enable_grad():
        view = param.view_as(param)
    assert view.grad_fn is not None
    return view.grad_fn.next_functions[0][0]


def _after_accumulation(hook: GradientHook, *_: object) -> None:
    hook(_NOTHING)


class PlainTensors:
    """The parameters of one bucket, which are ordinary tensors.

    Args:
        params: In the order in which their gradients lie in the bucket.
        place: Mesh and device.
        param_dtype: dtype in which floating-point parameters compute; None: as they are.
        gradient_hook: Makes the hook that hears of a whole gradient of parameter ``index``.
    """

    def __init__(
        self,
        params: Sequence[PlainParam],
        *,
        place: Place,
        param_dtype: torch.dtype | None,
        gradient_hook: Callable[[int], GradientHook],
    ) -> None:
        self.params: list[ShardedParam] = list(params)
        self.place = place
        self.label = ""  # the unit's name; known once its root is sharded
        self._param_dtype = param_dtype
        self._gradient_hook = gradient_hook
        # Hooks of the nodes, not of the parameters: those of users come first, and see `.grad`.
        # A parameter does not keep its node alive.
        self._nodes: list[tuple[object, torch.utils.hooks.RemovableHandle]] = []
        self._casts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copies: UnshardedStorage | None = None
        self.rebuild()

    def rebuild(self) -> None:
        """Listen to the parameters as they are now, and make the copies that they need."""
        self.let_go()
        params = [param.sharded for param in self.params]
        self._dtypes = [each.dtype for each in params]
        self.compute_dtypes = [
            self._param_dtype if self._param_dtype and each.is_floating_point() else each.dtype
            for each in params
        ]
        self.is_one_dtype = len(set(self.compute_dtypes)) == 1
        layouts = [param.layout for param in self.params]
        self.layout = FlatLayout.build(layouts, self._dtypes)
        cast = [i for i, each in enumerate(params) if each.dtype != self.compute_dtypes[i]]
        if cast:
            self._make_copies(cast)
        for index, param in enumerate(self.params):
            face = param.unsharded
            if not face.is_floating_point():
                continue
            flag = face.requires_grad
            face.requires_grad_(True)  # only then it has a node
            node = _accumulator_of(face)
            hook = partial(_after_accumulation, self._gradient_hook(index))
            self._nodes.append((node, node.register_hook(hook)))
            face.requires_grad_(flag)

    def _make_copies(self, cast: list[int]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            layouts = [param.layout for param in self.params]
            flat = FlatLayout.build(layouts, self.compute_dtypes, tuple(cast))
            self._copies = UnshardedStorage(flat, self.place.device)
            self._copies.allocate()  # for the views to be made
            for index in cast:
                param = self.params[index]
                assert isinstance(param, PlainParam)
                view = param.shaped(self._copies.views[index])
                flag = param.sharded.requires_grad
                param.unsharded = torch.nn.Parameter(view.data, requires_grad=flag)
                mark_as(param.unsharded, Mark.WHOLE_FACE, param.fqn)
                self._casts.append((view, param.sharded))
            self._copies.free()

    def let_go(self) -> None:
        """Leave the parameters as if they had never been in here."""
        for _, handle in self._nodes:
            handle.remove()
        self._nodes.clear()
        self._casts.clear()
        self._copies = None
        for param in self.params:
            param.unsharded = param.sharded

    @property
    def has_copies(self) -> bool:
        """Whether any parameter computes in another dtype than it is kept in."""
        return bool(self._casts)

    # --- what is the same for all that is kept whole ----------------------------------------

    @property
    def link(self) -> HostLink | None:
        """See ``Faces.link``: shards are not in host memory."""
        return None

    @property
    def is_partly_meta(self) -> bool:
        """See ``Faces.is_partly_meta``."""
        return False

    @property
    def is_away(self) -> bool:
        """See ``Faces.is_away``."""
        return False

    def check_materialised(self) -> None:
        """See ``Faces.check_materialised``: ``replicate`` has looked."""

    def move(self, home: Home | None) -> torch.Tensor:
        """See ``Faces.move``.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "a replicated module cannot be offloaded; use module.to(device) between steps, or "
            "fully_shard, which can."
        )

    # --- on the way to use and back ---------------------------------------------------------

    def start_gather(self, comm: Communicator) -> GatherInFlight:
        """See ``Faces.start_gather``: everything is here."""
        return GatherInFlight(_NOTHING, _NOTHING, DONE)

    @torch.no_grad()
    def fill_whole(self, gathered: Rows, *, comes_again: bool) -> None:
        """See ``Faces.fill_whole``: fill the copies."""
        if self._copies is not None:
            self._copies.allocate()
            for view, param in self._casts:
                view.copy_(param)

    def free_whole(self) -> None:
        """See ``Faces.free_whole``."""
        if self._copies is not None:
            self._copies.free()

    @property
    def can_leave(self) -> bool:
        """See ``Faces.can_leave``: nobody is given copies outside of forward."""
        return False

    def leave_whole(self, joining_hook: Callable[[int], GradientHook], *, stays: bool) -> None:
        """See ``Faces.leave_whole``."""
        raise AssertionError("what is kept whole is nowhere given back")

    # --- edits made from outside ------------------------------------------------------------

    @property
    def version(self) -> int:
        """Grows with every edit of a parameter of which there is a copy."""
        return sum(param._version for _, param in self._casts)

    def version_unless_replaced(self) -> int | None:
        """See ``Faces.version_unless_replaced``."""
        for param, dtype in zip(self.params, self._dtypes, strict=True):
            sharded = param.sharded
            if sharded.dtype is not dtype:
                return None  # a submodule was cast, and autograd has dropped the hooks
            for parameters, name in param._slots:
                held = parameters.get(name)
                if held is not sharded and held is not param.unsharded:
                    return None
        return self.version

    def take_replacements(self) -> bool:
        """See ``Faces.take_replacements``.

        Raises:
            RuntimeError: A parameter was replaced by one of another shape or type.
        """
        replaced = [param.sharded.dtype for param in self.params] != self._dtypes
        for param in self.params:
            strangers = param.strangers()
            if not strangers:
                continue
            new, old = strangers[0], param.sharded
            if type(new) is not type(old) or new.shape != old.shape or new.device != old.device:
                raise RuntimeError(
                    f"parameter {param.fqn!r} of {self.label!r} was replaced after replicate by a "
                    f"{type(new).__name__} of shape {tuple(new.shape)} on {new.device}; assign an "
                    f"nn.Parameter of shape {tuple(old.shape)} on {old.device} with the same "
                    "values on every rank, or replace it before replicate."
                )
            mark_as(old, Mark.REPLACED_LATER, param.fqn)
            param.sharded = new
            param.show(new)
            replaced = True
        return replaced

    def for_copy(
        self, params: list[ShardedParam], gradient_hook: Callable[[int], GradientHook]
    ) -> PlainTensors:
        """See ``Faces.for_copy``."""
        copied = copy.copy(self)
        copied.params = params
        copied._gradient_hook = gradient_hook
        copied._nodes, copied._casts = [], []
        copied.rebuild()
        return copied
