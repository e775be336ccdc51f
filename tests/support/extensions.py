"""Use these tensor subclasses with a custom all-gather, and ``RoundingModel``, their oracle.

``Int8OnWire`` travels as int8 with one scale per row and computes as an ordinary tensor.
``Bfloat16Whole`` travels in bfloat16 and stays a tensor subclass when whole. What either does to a
row does not depend on which rank owns it, so one process can do the same to the whole parameter.
"""

import math

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

aten = torch.ops.aten


class Wrapper(torch.Tensor):
    """A tensor around another one, which computes with that."""

    KEEPS_CLASS = frozenset(
        {
            aten.detach.default,
            aten.clone.default,
            aten.copy_.default,
            aten.slice.Tensor,
            aten.split.Tensor,
            aten.view.default,
            aten.as_strided.default,
            aten.new_zeros.default,
            aten.empty_like.default,
            aten._to_copy.default,
        }
    )

    @staticmethod
    def __new__(cls, inner, dtype=None):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=dtype or inner.dtype,
            device=inner.device,
        )

    def __init__(self, inner, dtype=None):
        self.inner = inner

    def __repr__(self):
        return f"{type(self).__name__}({self.inner})"

    def __tensor_flatten__(self):
        return ["inner"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner_tensors, dtype, outer_size, outer_stride):
        return cls(inner_tensors["inner"], dtype)

    def computed_with(self):
        """Return the ordinary tensor that operations see."""
        return self.inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        keeps = func in cls.KEEPS_CLASS
        dtype = next((arg.dtype for arg in args if isinstance(arg, Wrapper)), None)

        def unwrap(tensor):
            return tensor.inner if keeps else tensor.computed_with()

        args, kwargs = _pytree.tree_map_only(Wrapper, unwrap, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if not keeps:
            return result
        return _pytree.tree_map_only(
            torch.Tensor, lambda inner: cls(inner, dtype if cls is WholeBfloat16 else None), result
        )


def quantised(rows):
    """Return int8 values and the power of two that each row is multiplied with."""
    largest = rows.abs().amax(dim=1, keepdim=True) / 127
    exponent = torch.where(largest > 0, torch.frexp(largest).exponent, 0)
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    return (rows / scale).round().to(torch.int8), scale


class Int8OnWire(Wrapper):
    """Gathered as int8 and a scale per row; rows that a rank lacks are not padded."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return quantised(self.inner), None

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        values, scale = all_gather_outputs
        if out is not None:
            out = out.to_local() if isinstance(out, DTensor) else out
            rows = out.shape[0]
            torch.mul(values[:rows].to(param_dtype), scale[:rows].to(param_dtype), out=out)
            return None
        whole = values.to(param_dtype) * scale.to(param_dtype)
        return whole, (whole,)

    @staticmethod
    def rounded(whole):
        """Return what one process computes with."""
        values, scale = quantised(whole)
        return values * scale


class Int8ForThePeer(Int8OnWire):
    """The same for torch's fully_shard, under which writing to ``out`` concerns autograd."""

    def fsdp_post_all_gather(self, *args, out=None):
        if out is None:
            return super().fsdp_post_all_gather(*args)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            return super().fsdp_post_all_gather(*args, out=out)


class WholeBfloat16(Wrapper):
    """A whole parameter of bfloat16 values, which computes in the dtype that it says it has."""

    KEEPS_CLASS = (Wrapper.KEEPS_CLASS | {aten.t.default}) - {aten._to_copy.default}

    def computed_with(self):
        return self.inner.to(self.dtype)


class Bfloat16Whole(Wrapper):
    """Gathered in bfloat16, padded as torch's fully_shard asks for."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        rows = math.ceil(outer_size[0] / mesh.size())
        sent = self.inner.new_zeros((rows, *outer_size[1:]), dtype=torch.bfloat16)
        sent[: self.inner.shape[0]].copy_(self.inner)
        return (sent,), outer_size

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        (gathered,) = all_gather_outputs
        if out is not None:
            out = out.to_local() if isinstance(out, DTensor) else out
            assert isinstance(out, WholeBfloat16)
            same = gathered.untyped_storage().data_ptr() == out.inner.untyped_storage().data_ptr()
            assert same, "the memory of a whole parameter is not that which was gathered into"
            return None
        return WholeBfloat16(gathered, param_dtype), (gathered,)

    @staticmethod
    def rounded(whole):
        """Return what one process computes with."""
        return whole.bfloat16().to(whole.dtype)


class _AsRounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, whole, rounded):
        return rounded(whole)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class RoundingModel(torch.nn.Module):
    """A plain model that computes with rounded weights: the oracle.

    Args:
        model: Its matrices are used as ``kind.rounded`` of them; gradients are those of that.
        kind: ``Int8OnWire`` or ``Bfloat16Whole``.
    """

    def __init__(self, model, kind):
        super().__init__()
        self.model = model
        self.kind = kind

    def forward(self, x):
        params = {
            name: _AsRounded.apply(param, self.kind.rounded) if param.dim() == 2 else param
            for name, param in self.model.named_parameters()
        }
        return torch.func.functional_call(self.model, params, (x,))


def with_matrices_as(model, kind):
    """Make every matrix among the parameters of ``model`` one of class ``kind``, in place."""
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if param.dim() == 2:
                wrapped = torch.nn.Parameter(kind(param.detach()), param.requires_grad)
                setattr(module, name, wrapped)
    return model


def linear(kind, rows=5, columns=3):
    """Return a layer with a matrix of ``kind``, filled with different integers."""
    layer = torch.nn.Linear(columns, rows)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.arange(param.numel()).view(param.shape) - 4.0)
    return with_matrices_as(layer, kind)
