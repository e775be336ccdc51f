"""What torch 2.15 has added to its fully_shard, beside ours: the same on the same ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from tests.peers.both import LIBRARIES, mesh_of, shard
from tests.support.integer_model import IntegerModel, integer_batch, integer_loss
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(torch_fsdp, "GradientReductionHandle"),
    reason=f"torch's fully_shard has it since torch 2.15; this is {torch.__version__}",
)


def with_both(act, *args):
    """Return what it gives with torch's library, and with ours."""
    return [act(lib, *args) for lib in LIBRARIES.values()]


def sharded(lib, mesh_shape=(2,), *, is_manual=True):
    model = IntegerModel()
    shard(lib, *model.blocks, model, mesh=mesh_of(*mesh_shape))
    model.set_manual_backward_finalization(is_manual)
    return model


def backward(model, place=0):
    integer_loss(model(integer_batch(place, dist.get_rank()))).backward()


def gradients_of_windows(lib, mesh_shape, count, is_async, is_manual):
    """Gradients of two windows, in which all but the last backward reduce nothing."""
    model, found = sharded(lib, mesh_shape, is_manual=is_manual), []
    for step in range(2):
        for place in range(count):
            model.set_requires_gradient_sync(not is_manual and place == count - 1)
            backward(model, 10 * step + place)
        model.set_requires_gradient_sync(True)
        if is_manual:
            handle = model.finalize_backward(async_op=is_async)
            if is_async:
                handle.wait()
        found.append([param.grad.full_tensor().tolist() for param in model.parameters()])
        model.zero_grad()
    return found


@pytest.mark.parametrize(("count", "is_async"), [(1, False), (2, False), (3, True)])
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_gradients(run_ranks, mesh_shape, count, is_async):
    args = mesh_shape, count, is_async
    manual = run_ranks(with_both, 2 * len(mesh_shape), gradients_of_windows, *args, True)
    assert manual == run_ranks(with_both, 2 * len(mesh_shape), gradients_of_windows, *args, False)
    for theirs, ours in manual:
        assert ours == theirs


def overrides(lib):
    """The dtypes in which parameters compute, are kept and get gradients; and these."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    nn.init.ones_(layer[0].weight)
    policy = lib.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        param_dtype_override_fn=lambda param: param.dtype if param.dim() == 1 else None,
    )
    shard(lib, layer, mp_policy=policy)
    layer[0].bias.requires_grad_(False)
    seen = []
    for module in layer:
        module.register_forward_pre_hook(lambda m, _: seen.extend([m.weight.dtype, m.bias.dtype]))
    layer[0].forward = lambda x: x.to(layer[0].weight.dtype) @ layer[0].weight
    layer[1].forward = lambda x: x.float() * layer[1].weight + layer[1].bias
    layer(torch.ones(2, 4) * (1 + dist.get_rank())).sum().backward()
    params = [param for param in layer.parameters() if param.grad is not None]
    return (
        seen,
        [(param.dtype, param.grad.dtype) for param in params],
        [param.grad.full_tensor().tolist() for param in params],
    )


@on_ranks(2)
def test_dtypes_of_single_parameters():
    theirs, ours = with_both(overrides)
    assert ours == theirs
    assert ours[0] == [torch.bfloat16] + [torch.float32] * 3


def addresses(lib):
    """Whether addresses of unsharded parameters stay over gathers."""
    model = sharded(lib, is_manual=False)
    model.set_keep_unsharded_storage(True)
    seen = []
    for block in model.blocks:
        block.linear.register_forward_hook(lambda module, *_: seen.append(module.weight.data_ptr()))
    for step in range(3):
        backward(model, step)
    return seen[:3] == seen[3:6] == seen[6:]


@on_ranks(2)
def test_addresses():
    assert with_both(addresses) == [True, True]


def error_of(function, *args, **kwargs):
    kinds = (RuntimeError, TypeError, ValueError)
    try:
        function(*args, **kwargs)
    except kinds as error:
        return next(kind.__name__ for kind in kinds if isinstance(error, kind))
    return None


def errors(lib):
    """The class of each error, one that Python has, by what was done."""
    found = {}
    model = sharded(lib)
    found["before the first forward"] = error_of(model.finalize_backward)
    found["its handle"] = error_of(model.finalize_backward(async_op=True).wait)
    backward(model)
    inner = model.blocks[0]
    found["mode of an inner unit"] = error_of(inner.set_manual_backward_finalization, True)
    found["an inner unit"] = error_of(inner.finalize_backward)
    found["mode after a backward"] = error_of(model.set_manual_backward_finalization, False)
    found["same mode"] = error_of(model.set_manual_backward_finalization, True)
    handle = model.finalize_backward(async_op=True)
    found["a forward before wait"] = error_of(backward, model)
    found["again before wait"] = error_of(model.finalize_backward)
    found["mode before wait"] = error_of(model.set_manual_backward_finalization, False)
    found["wait"], found["wait again"] = error_of(handle.wait), error_of(handle.wait)
    found["nothing new"] = error_of(model.finalize_backward)
    backward(model)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    found["wait after a reset"] = error_of(handle.wait)
    found["mode after a reset"] = error_of(model.set_manual_backward_finalization, False)
    automatic = sharded(lib, is_manual=False)
    backward(automatic)
    found["without the mode"] = error_of(automatic.finalize_backward)
    for name, act in (
        ("finalized in a backward", lambda model: model.finalize_backward()),
        ("mode in a backward", lambda model: model.set_manual_backward_finalization(False)),
    ):
        inside = sharded(lib)
        output = inside(integer_batch(0, dist.get_rank()))
        output.register_hook(lambda _, act=act, model=inside: act(model))
        found[name] = error_of(integer_loss(output).backward)
        inside.reset_iter_state()
    for returned in (torch.float16, 3):
        policy = lib.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, param_dtype_override_fn=lambda _, chosen=returned: chosen
        )
        found[f"{returned} of an override"] = error_of(
            shard, lib, nn.Linear(2, 2), mp_policy=policy
        )
    return found


@on_ranks(2)
def test_errors():
    theirs, ours = with_both(errors)
    assert ours == theirs
    assert set(ours.values()) == {None, "RuntimeError", "ValueError"}
