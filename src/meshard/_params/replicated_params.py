"""Parameters that every rank keeps unsharded.

To the engine it is cut into one shard. Its gradient lies in a bucket in the order in which the
parameter itself lies in memory, so that a parameter in ``channels_last`` has a gradient that is so
too.

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
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._comm.all_gather import GatherInFlight
from meshard._comm.communicator import DONE, Communicator, Rows
from meshard._comm.host_copies import HostCopies
from meshard._mesh.layout import FlatLayout, ParamLayout
from meshard._mesh.mesh_info import MeshInfo
from meshard._params.flat_params import GradientHook, GroupSpec
from meshard._params.sharded_param import ShardedParam, TensorTag, tag_tensor
from meshard._params.storage import MemoryLocation, UnshardedMemoryPool
from meshard._torch.dtensor import make_dtensor


class ReplicatedParam(ShardedParam):
    """A parameter of a replicated module: both faces are the parameter itself.

    Unless the module computes in another dtype: then the face in use is a copy in that one.

    Args:
        fqn: Dotted name from the module.
        owners: Every ``(module, attribute)`` that holds the parameter; several if it is tied.
        param: The parameter.
    """

    __slots__ = ()

    def __init__(self, fqn: str, owners: list[tuple[nn.Module, str]], param: nn.Parameter) -> None:
        super().__init__(fqn, owners, ParamLayout(torch.Size((param.numel(),)), 0, 1))
        self.shard_rank = 0
        self.sharded = self.unsharded = param

    @property
    def is_given_otherwise(self) -> bool:
        """See ``ShardedParam.is_given_otherwise``: always."""
        return True

    @property
    def is_cast(self) -> bool:
        """Whether the face in use is a copy."""
        return self.unsharded is not self.sharded

    def own_part_of(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient as ``[numel]``, in the order in which the parameter lies in memory."""
        param = self.sharded
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if gradient.stride() != param.stride() or not _is_dense(param):
            ordered = torch.empty_strided(
                param.shape, _dense_strides(param), dtype=gradient.dtype, device=gradient.device
            )
            gradient = ordered.copy_(gradient)
        return gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset())

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return ``[numel]`` of a bucket in the shape of the parameter: the same memory.

        It is no view to autograd, which would forbid ``detach_()``.
        """
        param = self.sharded
        return flat.as_strided(param.shape, _dense_strides(param), flat.storage_offset()).detach()

    def own_part(self, unsharded: torch.Tensor) -> torch.Tensor:
        """Return ``unsharded`` itself: there is one shard."""
        return unsharded.detach()

    def partial_of(self, local: torch.Tensor, mesh_info: MeshInfo) -> DTensor:
        """Return ``local`` as a gradient that has not been reduced across the replicas."""
        unsharded = self.shaped(local).contiguous()
        return make_dtensor(
            unsharded, mesh_info.mesh, mesh_info.partial_placements(0), unsharded.shape
        )

    def for_copy(self, memo: dict[int, Any]) -> ReplicatedParam:
        """Return a parameter without owners, with a deep copy of the parameter."""
        copied = ReplicatedParam(self.fqn, [], copy.deepcopy(self.sharded, memo))
        memo[id(self.unsharded)] = copied.sharded
        return copied


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.stride() == _dense_strides(tensor)


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return strides that fill memory without gaps, in the order of those of ``tensor``."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


_NOTHING = torch.empty(0)


def _accumulator_of(param: torch.Tensor) -> Any:
    """Return the node of autograd that adds to ``.grad``."""
    with torch.enable_grad():
        view = param.view_as(param)
    assert view.grad_fn is not None
    return view.grad_fn.next_functions[0][0]


def _after_accumulation(hook: GradientHook, *_: object) -> None:
    hook(_NOTHING)


class ReplicatedParams:
    """The parameters of one bucket, which are ordinary tensors.

    Args:
        params: In the order in which their gradients lie in the bucket.
        spec: Mesh and device.
        param_dtype: dtype in which floating-point parameters compute; None: as they are.
        gradient_hook: Makes the hook that hears of a whole gradient of parameter ``index``.
    """

    def __init__(
        self,
        params: Sequence[ReplicatedParam],
        *,
        spec: GroupSpec,
        param_dtype: torch.dtype | None,
        gradient_hook: Callable[[int], GradientHook],
    ) -> None:
        self.params: list[ShardedParam] = list(params)
        self.spec = spec
        self.label = ""  # the unit's name; known once its root is sharded
        self.comm: Communicator  # shared by all units of a root
        self._param_dtype = param_dtype
        self._gradient_hook = gradient_hook
        # Hooks of the nodes, not of the parameters: those of users come first, and see `.grad`.
        # A parameter does not keep its node alive.
        self._nodes: list[tuple[object, torch.utils.hooks.RemovableHandle]] = []
        self._casts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copies: UnshardedMemoryPool | None = None
        self.rebuild()

    def rebuild(self) -> None:
        """Listen to the parameters as they are now, and make the copies that they need."""
        self.unhook()
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
            unsharded_param = param.unsharded
            if not unsharded_param.is_floating_point():
                continue
            flag = unsharded_param.requires_grad
            unsharded_param.requires_grad_(True)  # only then it has a node
            node = _accumulator_of(unsharded_param)
            hook = partial(_after_accumulation, self._gradient_hook(index))
            self._nodes.append((node, node.register_hook(hook)))
            unsharded_param.requires_grad_(flag)

    def _make_copies(self, cast: list[int]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            layouts = [param.layout for param in self.params]
            flat = FlatLayout.build(layouts, self.compute_dtypes, tuple(cast))
            self._copies = UnshardedMemoryPool(flat, self.spec.device)
            self._copies.allocate()  # for the views to be made
            for index in cast:
                param = self.params[index]
                assert isinstance(param, ReplicatedParam)
                view = param.shaped(self._copies.views[index])
                flag = param.sharded.requires_grad
                param.unsharded = torch.nn.Parameter(view.data, requires_grad=flag)
                tag_tensor(param.unsharded, TensorTag.UNSHARDED, param.fqn)
                self._casts.append((view, param.sharded))
            self._copies.free()

    def unhook(self) -> None:
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
    def host_copies(self) -> HostCopies | None:
        """See ``UnitParams.host_copies``: shards are not in host memory."""
        return None

    @property
    def is_partly_meta(self) -> bool:
        """See ``UnitParams.is_partly_meta``."""
        return False

    @property
    def is_offloaded(self) -> bool:
        """See ``UnitParams.is_offloaded``."""
        return False

    def check_materialised(self) -> None:
        """See ``UnitParams.check_materialised``: ``replicate`` has looked."""

    def move(self, location: MemoryLocation | None) -> torch.Tensor:
        """See ``UnitParams.move``.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "a replicated module cannot be offloaded; use module.to(device) between steps, or "
            "fully_shard, which can."
        )

    # --- on the way to use and back ---------------------------------------------------------

    def start_gather(self, comm: Communicator) -> GatherInFlight:
        """See ``UnitParams.start_gather``: everything is here."""
        return GatherInFlight(_NOTHING, _NOTHING, DONE)

    @torch.no_grad()
    def fill_unsharded(self, gathered: Rows, *, comes_again: bool) -> None:
        """See ``UnitParams.fill_unsharded``: fill the copies."""
        if self._copies is not None:
            self._copies.allocate()
            for view, param in self._casts:
                view.copy_(param)

    def free_unsharded(self) -> None:
        """See ``UnitParams.free_unsharded``."""
        if self._copies is not None:
            self._copies.free()

    @property
    def can_leave(self) -> bool:
        """See ``UnitParams.can_leave``: nobody is given copies outside of forward."""
        return False

    def leave_whole(self, joining_hook: Callable[[int], GradientHook], *, stays: bool) -> None:
        """See ``UnitParams.leave_whole``."""
        raise AssertionError("what is kept whole is nowhere given back")

    # --- edits made from outside ------------------------------------------------------------

    @property
    def version(self) -> int:
        """Grows with every edit of a parameter of which there is a copy."""
        return sum(param._version for _, param in self._casts)

    def version_unless_replaced(self) -> int | None:
        """See ``UnitParams.version_unless_replaced``."""
        for param, dtype in zip(self.params, self._dtypes, strict=True):
            sharded = param.sharded
            if sharded.dtype is not dtype:
                return None  # a submodule was cast, and autograd has dropped the hooks
            for parameters, name in param._owner_dicts:
                installed = parameters.get(name)
                if installed is not sharded and installed is not param.unsharded:
                    return None
        return self.version

    def take_replacements(self) -> bool:
        """See ``UnitParams.take_replacements``.

        Raises:
            RuntimeError: A parameter was replaced by one of another shape or type.
        """
        replaced = [param.sharded.dtype for param in self.params] != self._dtypes
        for param in self.params:
            replacements = param.replacements()
            if not replacements:
                continue
            new, old = replacements[0], param.sharded
            if type(new) is not type(old) or new.shape != old.shape or new.device != old.device:
                raise RuntimeError(
                    f"parameter {param.fqn!r} of {self.label!r} was replaced after replicate by a "
                    f"{type(new).__name__} of shape {tuple(new.shape)} on {new.device}; assign an "
                    f"nn.Parameter of shape {tuple(old.shape)} on {old.device} with the same "
                    "values on every rank, or replace it before replicate."
                )
            tag_tensor(old, TensorTag.REPLACED_LATER, param.fqn)
            param.sharded = new
            param.install(new)
            replaced = True
        return replaced

    def for_copy(
        self, params: list[ShardedParam], gradient_hook: Callable[[int], GradientHook]
    ) -> ReplicatedParams:
        """See ``UnitParams.for_copy``."""
        copied = copy.copy(self)
        copied.params = params
        copied._gradient_hook = gradient_hook
        copied._nodes, copied._casts = [], []
        copied.rebuild()
        return copied
