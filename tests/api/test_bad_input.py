"""Wrong calls: each fails at once, says what to do, and leaves the module as it was."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Shard

import meshard
from meshard import CPUOffloadPolicy, MixedPrecisionPolicy
from tests.support.fake import fake_group


@pytest.fixture(autouse=True)
def eight_ranks():
    with fake_group(8):
        yield


def snapshot(module):
    return [
        (type(inner), dict(inner._parameters), dict(inner._forward_hooks), dict(vars(inner)))
        for inner in module.modules()
    ]


def check_refused(error, text, module, *args, looked_at=None, **kwargs):
    """The call raises, and the module (and what is in it) is what it was, object by object."""
    before = [] if looked_at is None else snapshot(looked_at)
    with pytest.raises(error, match=text):
        meshard.fully_shard(module, *args, **kwargs)
    after = [] if looked_at is None else snapshot(looked_at)
    assert len(before) == len(after)
    for (cls, params, hooks, state), (cls_, params_, hooks_, state_) in zip(
        before, after, strict=True
    ):
        assert cls is cls_ and hooks == hooks_ and state.keys() == state_.keys()
        assert all(params[name] is params_[name] for name in params)


def model():
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()))


def test_a_3d_mesh_is_refused():
    mesh = init_device_mesh("cpu", (2, 2, 2))
    net = model()
    check_refused(ValueError, "1D mesh .* or a 2D mesh", net, mesh, looked_at=net)


def test_something_else_than_a_mesh_is_refused():
    check_refused(TypeError, "mesh must be a DeviceMesh or None, got int", model(), 8)


@pytest.mark.parametrize("container", [nn.ModuleList, lambda ms: nn.ModuleDict({"a": ms[0]})])
def test_a_container_without_forward_is_refused(container):
    blocks = container([nn.Linear(8, 8)])
    name = type(blocks).__name__
    check_refused(ValueError, f"{name}, because it has no forward", blocks, looked_at=blocks)
    check_refused(ValueError, f"{name}, because it has no forward", [model(), blocks])


def test_a_module_list_with_a_forward_of_its_own_is_accepted():
    class Chain(nn.ModuleList):
        def forward(self, x):
            for module in self:
                x = module(x)
            return x

    chain = Chain([nn.Linear(8, 8)])
    meshard.fully_shard(chain)
    chain(torch.ones(1, 8)).sum().backward()


def test_applying_twice_is_refused():
    net = meshard.fully_shard(model())
    check_refused(ValueError, "applied to a Sequential that is sharded", net, looked_at=net)


def test_a_child_after_its_parent_is_refused():
    net = meshard.fully_shard(model())
    check_refused(
        ValueError,
        "'Linear.weight' already belongs to a unit .* children before",
        net[0],
        looked_at=net,
    )


def test_an_empty_list_is_refused():
    check_refused(ValueError, "empty list of modules", [])


def test_the_same_module_twice_in_a_list_is_refused():
    layer = nn.Linear(8, 8)
    check_refused(ValueError, "or given twice", [layer, layer], looked_at=layer)


@pytest.mark.parametrize("thing", [3, "linear", None, torch.ones(3)])
def test_something_else_than_a_module_is_refused(thing):
    check_refused(TypeError, f"needs an nn.Module .* got {type(thing).__name__}", thing)
    check_refused(TypeError, f"needs an nn.Module .* got {type(thing).__name__}", [thing])


def test_a_parameter_on_another_device_is_refused():
    net = model()
    with FakeTensorMode():
        net[1][0].bias = nn.Parameter(torch.empty(8, device="cuda"))
    check_refused(
        ValueError, "'1.0.bias' is on cuda:0, but the mesh is on cpu; move", net, looked_at=net
    )


@pytest.mark.parametrize("size", [3, 0, -2, 16])
def test_a_group_size_that_does_not_divide_the_ranks_is_refused(size):
    net = model()
    check_refused(
        ValueError,
        re.escape(f"reshard_after_forward={size} must divide the 8 ranks"),
        net,
        reshard_after_forward=size,
        looked_at=net,
    )


def test_reshard_after_forward_must_be_a_bool_or_an_int():
    check_refused(TypeError, "got 'yes'", model(), reshard_after_forward="yes")


@pytest.mark.parametrize("placement", [0, "rows", Partial(), (Shard(0),), Shard(2), Shard(-3)])
def test_a_bad_placement_is_refused_and_the_parameter_named(placement):
    net = model()
    check_refused(
        ValueError,
        r"shard_placement_fn returned .* for parameter '0.weight'",
        net,
        shard_placement_fn=lambda param: placement,
        looked_at=net,
    )


def test_a_dtype_of_its_own_for_gradients_is_not_built_for_replicate():
    net = model()
    net[1][0].bias.grad_dtype = torch.float64
    with pytest.raises(NotImplementedError, match=r"'1.0.bias', .*grad_dtype=torch.float64"):
        meshard.replicate(net)
    net[1][0].bias.grad_dtype = None  # any: that of the parameter
    net[1][0].weight.grad_dtype = torch.float32
    meshard.replicate(net)


def test_a_scalar_parameter_is_refused_and_named():
    net = model()
    net[1].register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
    check_refused(ValueError, r"'1.temperature' is a scalar .* shape \(1,\)", net, looked_at=net)
    meshard.fully_shard(net, ignored_params={net[1].temperature})
    assert type(net[1].temperature) is nn.Parameter


def test_parameters_tied_across_units_are_refused_and_both_named():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net[1].weight = net[0].weight
    meshard.fully_shard(net[0])
    check_refused(
        ValueError,
        r"'Sequential.1.weight' is tied to 'Linear.weight', .*\.fully_shard_units",
        net,
        looked_at=net,
    )


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"mp_policy": torch.bfloat16}, TypeError, "must be a MixedPrecisionPolicy"),
        ({"offload_policy": True}, TypeError, "must be an OffloadPolicy"),
        ({"offload_policy": CPUOffloadPolicy}, TypeError, "must be an OffloadPolicy"),
    ],
)
def test_a_bad_policy_is_refused(kwargs, error, text):
    net = model()
    check_refused(error, text, net, looked_at=net, **kwargs)


def test_a_meta_parameter_at_the_first_forward_is_named():
    with torch.device("meta"):
        net = model()
    meshard.fully_shard(net)
    with pytest.raises(RuntimeError, match=r"'0.weight' of unit '\(root\)' is still on the meta"):
        net(torch.ones(1, 8))
    net.to_empty(device="cpu")
    net(torch.ones(1, 8))


def test_a_failure_while_sharding_leaves_the_module_as_it_was(monkeypatch):
    net = model()

    def no_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("meshard._params.flat_params.UnshardedMemoryPool", no_memory)
    check_refused(torch.OutOfMemoryError, "no memory", net, looked_at=net)
    monkeypatch.undo()
    meshard.fully_shard(net)
    net(torch.ones(1, 8)).sum().backward()


def test_policies_check_their_dtypes():
    with pytest.raises(TypeError, match=r"param_dtype must be a torch\.dtype or None, got 'bf16'"):
        MixedPrecisionPolicy(param_dtype="bf16")
    with pytest.raises(ValueError, match="reduce_dtype must be a floating-point dtype"):
        MixedPrecisionPolicy(reduce_dtype=torch.int32)


def test_a_parameter_replaced_by_something_else_is_named_at_the_next_use():
    net = meshard.fully_shard(model())
    net[0].weight = nn.Parameter(torch.ones(4, 8))
    with pytest.raises(
        RuntimeError,
        match=r"'0.weight' of unit '\(root\)' was replaced .* \(4, 8\); .* shape \(8, 8\)",
    ):
        net(torch.ones(1, 8))


def test_a_parameter_removed_after_sharding_is_named_at_the_next_use():
    net = meshard.fully_shard(model())
    net[0].bias = None
    with pytest.raises(RuntimeError, match=r"'0.bias' was removed from its module"):
        net(torch.ones(1, 8))


def test_a_list_with_a_module_inside_another_is_refused():
    net = model()
    check_refused(ValueError, "a Linear is inside a Sequential", [net, net[0]], looked_at=net)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m: m.set_gradient_divide_factor(0), ValueError, "positive and finite, got 0"),
        (lambda m: m.set_gradient_divide_factor(-1.0), ValueError, "positive and finite"),
        (lambda m: m.set_gradient_divide_factor(float("nan")), ValueError, "positive and finite"),
        (lambda m: m.set_gradient_divide_factor("8"), TypeError, "must be a number, a callable"),
        (lambda m: m.set_gradient_sync("full"), TypeError, "must be a meshard.GradientSync"),
        (lambda m: m.set_requires_gradient_sync(1), TypeError, "must be a bool, got 1"),
        (lambda m: m.set_is_last_backward(None), TypeError, "must be a bool, got None"),
        (
            lambda m: m.set_modules_to_forward_prefetch([nn.ReLU()]),
            ValueError,
            "no unit in this ReLU",
        ),
        (lambda m: m.set_post_optim_event(None), TypeError, "must be a torch.Event, got None"),
        (lambda m: m.set_reduce_scatter_max_input_buffers(0), ValueError, "at least 1, got 0"),
        (lambda m: m.set_reduce_scatter_max_input_buffers(1.5), TypeError, "an int, got 1.5"),
        (lambda m: m.set_separate_reduce_scatter_group(1), TypeError, "must be a bool, got 1"),
        (lambda m: m.set_custom_all_gather(print), TypeError, "needs an object with allocate"),
        (lambda m: m.set_custom_reduce_scatter(3), TypeError, "needs an object with allocate"),
        (lambda m: m.set_symm_mem_for_comm(), NotImplementedError, "symmetric memory"),
        (lambda m: meshard.share_comm_ctx([m, nn.ReLU()]), ValueError, "got ReLU"),
    ],
)
def test_setters_refuse_what_they_cannot_mean(call, error, text):
    net = meshard.fully_shard(model())
    with pytest.raises(error, match=text):
        call(net)


def test_no_group_is_made_by_a_call_that_is_refused():
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="empty list"):
        meshard.fully_shard([])
    assert not dist.is_initialized()
    with fake_group(8):
        pass
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
