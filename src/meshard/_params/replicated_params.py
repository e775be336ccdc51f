"""Parameters of ``replicate``, which every rank keeps unsharded.

The engine treats such a parameter as sharded over one rank. Gradients lie in a *bucket*, one flat
buffer that is all-reduced. A gradient has the same memory order in the bucket as its parameter had
when it was replicated (or moved, by ``module.to()``), so a ``channels_last`` parameter has a
``channels_last`` gradient.

Nothing is gathered or freed, with one exception: if ``param_dtype`` differs from the dtype of a
parameter, a cast copy replaces the parameter in forward and backward.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from meshard._comm.communicator import Communicator, Done, Handle
from meshard._mesh.layout import FlatLayout, ParamLayout
from meshard._params.flat_params import UnshardedMemoryPool
from meshard._params.unit_params import (
    GradientHook,
    GradientHookMaker,
    GroupSpec,
    TensorTag,
    UnitParam,
    UnitParams,
    tag_tensor,
)
from meshard._torch.private import accumulation_hooks_of, gradient_hooks_of, version_of


class ReplicatedParam(UnitParam):
    """A parameter of a replicated module.

    ``sharded`` is the parameter itself. ``unsharded`` is the same object; if the module computes in
    another dtype, ``unsharded`` is a copy in that dtype.
    """

    def __init__(
        self,
        fqn: str,
        owners: Sequence[tuple[nn.Module, str]],
        param: nn.Parameter,
        *,
        keeps_dtype: bool = False,
    ) -> None:
        layout = ParamLayout(torch.Size((param.numel(),)), 0, 1)
        super().__init__(fqn, owners, layout, keeps_dtype=keeps_dtype)
        self.sharded = self.unsharded = param
        # The handle of a hook on the AccumulateGrad node, which runs after those of the user.
        self.after_hooks: Any = None
        self.take_memory_format()

    def take_memory_format(self) -> None:
        """Lay gradients out like the parameter from now on. No gradient may be pending.

        This is not called when the user sets ``weight.data = ...``. Gradients then keep their
        memory order, because accumulated sums have it, and other ranks too.
        """
        self._strides = _dense_strides(self.sharded)

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return ``flat [numel]`` in the parameter's shape and in ``take_memory_format``'s order.

        The result shares the memory of ``flat``. It is detached, because it may become a ``.grad``,
        and users may call ``detach_()`` on that. torch refuses such a call on a view.
        """
        return flat.as_strided(self.sharded.shape, self._strides, flat.storage_offset()).detach()

    def for_copy(self, memo: dict[int, Any]) -> ReplicatedParam:
        sharded = copy.deepcopy(self.sharded, memo)
        copied = ReplicatedParam(self.fqn, [], sharded, keeps_dtype=self.keeps_dtype)
        copied._strides = self._strides
        memo[id(self.unsharded)] = copied.sharded
        return copied


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a copy of ``tensor`` that has no gaps in memory."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def _arriving(
    param: ReplicatedParam, hook: GradientHook, gradients: tuple[torch.Tensor | None]
) -> tuple[None] | None:
    """Let ``hook`` take a gradient that autograd is about to add to ``.grad``.

    The user's hooks on the tensor have run. If there are post-accumulate hooks too, autograd adds
    it, to a ``.grad`` of None, and ``hook`` takes it from there after them.
    """
    (gradient,), tensor = gradients, param.unsharded
    if param.after_hooks is not None:
        param.after_hooks.remove()
        param.after_hooks = None
    if gradient is None or not tensor.requires_grad:  # it was frozen after the forward
        return None
    if not accumulation_hooks_of(tensor):
        return (None,) if hook(gradient) else None
    published, tensor.grad = tensor.grad, None

    def take(*_: object) -> None:
        gradient, tensor.grad = tensor.grad, published
        if gradient is None:
            raise RuntimeError(
                f"a hook took the gradient of parameter {param.fqn!r} of a replicated module "
                "before it was reduced, so ranks would drift apart. To step in backward call "
                "meshard.overlap_optimizer; hooks may read .grad and change it in place."
            )
        hook(gradient)

    param.after_hooks = get_gradient_edge(tensor).node.register_hook(take)
    return None


def _check_not_hooked(param: ReplicatedParam) -> None:
    if gradient_hooks_of(param.sharded) or accumulation_hooks_of(param.sharded):
        raise RuntimeError(
            f"parameter {param.fqn!r} of a replicated module has a hook that would not be called: "
            f"the module computes with a copy of it in {param.unsharded.dtype} (param_dtype of "
            "mp_policy). Use meshard.register_reduce_hook, or meshard.overlap_optimizer to step in "
            "backward."
        )


class ReplicatedParams(UnitParams):
    """The parameters of one replicated module, which are ordinary tensors."""

    def __init__(
        self,
        params: list[ReplicatedParam],
        *,
        spec: GroupSpec,
        param_dtype: torch.dtype | None,  # the dtype of compute; None: that of each parameter
        gradient_hook: GradientHookMaker,  # whose hooks take the gradient, and return True
        bucket_cap: int,  # bytes of parameters in a bucket
        are_views: bool,  # whether .grad are views of buckets
    ) -> None:
        self.params: list[ReplicatedParam] = params
        self.spec = spec
        self._param_dtype = param_dtype
        self._gradient_hook = gradient_hook
        self.bucket_cap = bucket_cap
        self.are_views = are_views
        # Our hooks are on the AccumulateGrad nodes. A parameter does not keep its node alive, so
        # the nodes are kept here.
        self._nodes: list[tuple[object, torch.utils.hooks.RemovableHandle]] = []
        self._casts: list[tuple[torch.Tensor, ReplicatedParam]] = []  # (cast copy, parameter)
        self._copies: UnshardedMemoryPool | None = None
        self.rebuild()

    def rebuild(self) -> None:
        self.unhook()
        params = [param.sharded for param in self.params]
        self._dtypes = [each.dtype for each in params]
        dtypes = [
            param.compute_dtype(dtype, self._param_dtype)
            for param, dtype in zip(self.params, self._dtypes, strict=True)
        ]
        self.layout = FlatLayout.build([param.layout for param in self.params], self._dtypes)
        cast_ = [i for i, dtype in enumerate(dtypes) if dtype != self._dtypes[i]]
        if cast_:
            self._make_copies(FlatLayout.build(self.layout.params, dtypes, cast_), cast_)
        self._read_dtypes()
        for index, param in enumerate(self.params):
            if param.unsharded.is_floating_point():
                self._hook(param, self._gradient_hook(index))

    def _hook(self, param: ReplicatedParam, hook: GradientHook) -> None:
        tensor = param.unsharded
        flag = tensor.requires_grad
        tensor.requires_grad_(True)  # a frozen tensor has no AccumulateGrad node
        with torch.inference_mode(False), torch.enable_grad():
            view = tensor.view_as(tensor)
        assert view.grad_fn is not None
        node: Any = view.grad_fn.next_functions[0][0]  # AccumulateGrad
        self._nodes.append((node, node.register_prehook(partial(_arriving, param, hook))))
        tensor.requires_grad_(flag)

    def _make_copies(self, layout: FlatLayout, indices: list[int]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._copies = UnshardedMemoryPool(layout, self.spec.device)
            self._copies.allocate()  # because as_strided needs memory
            for index in indices:
                param = self.params[index]
                view = param.shaped(self._copies.views[index])
                flag = param.sharded.requires_grad
                param.unsharded = nn.Parameter(view.data, requires_grad=flag)
                tag_tensor(param.unsharded, TensorTag.UNSHARDED, param.fqn)
                self._casts.append((view, param))
            self._copies.free()

    def unhook(self) -> None:
        """Remove hooks and copies from the parameters."""
        for _, handle in self._nodes:
            handle.remove()
        self._nodes.clear()
        self._casts.clear()
        self._copies = None
        for param in self.params:
            param.unsharded = param.sharded

    # --- gather ----------------------------------------------------------------------------

    def start_gather(self, comm: Communicator) -> Handle:
        return Done(torch.empty(0))

    @torch.no_grad()
    def all_gather_copy_out(self, gathered: torch.Tensor) -> None:
        if self._copies is not None:
            self._copies.allocate()
            for view, param in self._casts:
                _check_not_hooked(param)
                view.copy_(param.sharded)

    def free_unsharded(self) -> None:
        if self._copies is not None:
            self._copies.free()

    # --- edits by users --------------------------------------------------------------------

    @property
    def version(self) -> int:
        return sum(version_of(param.sharded) for _, param in self._casts)

    @property
    def has_replacements(self) -> bool:
        # After ``module.double()``, say, a parameter has another AccumulateGrad node, and our hook
        # is on the old one.
        has_others = [param.sharded.dtype for param in self.params] != self._dtypes
        return has_others or super().has_replacements

    def take_replacements(self) -> bool:
        replaced = [param.sharded.dtype for param in self.params] != self._dtypes
        found = [(param, param.replacements()) for param in self.params]
        pairs = [(param, replacements[0]) for param, replacements in found if replacements]
        for param, new in pairs:  # before any of them is adopted
            old = param.sharded
            if type(new) is not type(old) or new.shape != old.shape or new.device != old.device:
                raise RuntimeError(
                    f"parameter {param.fqn!r} of {self.label!r} was replaced after replicate by a "
                    f"{type(new).__name__} of shape {tuple(new.shape)} on {new.device}; assign an "
                    f"nn.Parameter of shape {tuple(old.shape)} on {old.device} with the same "
                    "values on every rank, or replace it before replicate."
                )
        for param, new in pairs:
            tag_tensor(param.sharded, TensorTag.REPLACED_LATER, param.fqn)
            param.sharded = new
            param.install(new)
        return replaced or bool(pairs)

    def for_copy(self, params: Sequence[UnitParam], gradient_hook: GradientHookMaker) -> UnitParams:
        return ReplicatedParams(
            cast("list[ReplicatedParam]", params),
            spec=self.spec,
            param_dtype=self._param_dtype,
            gradient_hook=gradient_hook,
            bucket_cap=self.bucket_cap,
            are_views=self.are_views,
        )

    def check_materialised(self) -> None:
        pass  # replicate has checked the device of every parameter
