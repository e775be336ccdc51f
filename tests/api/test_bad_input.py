"""Wrong calls: each fails, and what cannot be sharded stays as it was."""

import inspect
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Shard

import meshard
from meshard import (
    CPUOffloadPolicy,
    FSDPModule,
    GradientSync,
    MixedPrecisionPolicy,
    ReplicateModule,
)
from tests.support.ranks import fake_group, on_fake_ranks


def snapshot(module):
    return [
        (type(inner), dict(inner._parameters), dict(inner._forward_hooks), dict(vars(inner)))
        for inner in module.modules()
    ]


def check_refused(error, text, module, *, inside=None, **kwargs):
    """The call raises, and the module (or what it is inside) is what it was, object by object."""
    inside = inside or (module if isinstance(module, nn.Module) else nn.Module())
    before = snapshot(inside)
    with pytest.raises(error, match=text):
        meshard.fully_shard(module, **kwargs)
    for (cls, params, hooks, state), now in zip(before, snapshot(inside), strict=True):
        assert cls is now[0] and hooks == now[2] and state.keys() == now[3].keys()
        assert all(params[name] is now[1][name] for name in params)


def model():
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()))


def on_another_device():
    net = model()
    with FakeTensorMode():
        net[1][0].bias = nn.Parameter(torch.empty(8, device="cuda"))
    return net


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: nn.ModuleList([nn.Linear(8, 8)]), "ModuleList, because it has no forward"),
        (lambda: [nn.ReLU(), nn.ModuleDict({"a": model()})], "ModuleDict, because it has no"),
        (lambda: meshard.fully_shard(model()), "applied to a Sequential that is sharded"),
        (list, "empty list of modules"),
        (lambda: [net := model(), net], "or given twice"),
        (lambda: [net := model(), net[0]], "a Linear is inside a Sequential"),
        (on_another_device, "'1.0.bias' is on cuda:0, but the mesh is on cpu; move"),
    ],
)
@on_fake_ranks(8)
def test_modules_that_cannot_be_a_unit_are_refused(build, text):
    check_refused(ValueError, text, build())


@on_fake_ranks(8)
def test_a_child_after_its_parent_is_refused():
    net = meshard.fully_shard(model())
    text = "'Linear.weight' already belongs to a unit .* children before"
    check_refused(ValueError, text, net[0], inside=net)


@on_fake_ranks(8)
def test_a_module_list_with_a_forward_of_its_own_is_accepted():
    class Chain(nn.ModuleList):
        def forward(self, x):
            return self[0](x)

    chain = meshard.fully_shard(Chain([nn.Linear(8, 8)]))
    chain(torch.ones(1, 8)).sum().backward()


SIZE_TEXT = r"reshard_after_forward={} must divide the 8 ranks"
PLACEMENT_TEXT = r"shard_placement_fn returned .* for parameter '0.weight'"


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"mesh": 8}, TypeError, "mesh must be a DeviceMesh or None, got int"),
        ({"mp_policy": torch.bfloat16}, TypeError, "must be a MixedPrecisionPolicy"),
        ({"offload_policy": True}, TypeError, "must be an OffloadPolicy"),
        ({"offload_policy": CPUOffloadPolicy}, TypeError, r"an instance: CPUOffloadPolicy\(\)"),
        ({"reshard_after_forward": "yes"}, TypeError, "got 'yes'"),
        *[
            ({"reshard_after_forward": size}, ValueError, SIZE_TEXT.format(size))
            for size in (3, 0, -2, 16)
        ],
        *[
            ({"shard_placement_fn": lambda _, it=placement: it}, ValueError, PLACEMENT_TEXT)
            for placement in (0, "rows", Partial(), (Shard(0),), Shard(2), Shard(-3))
        ],
    ],
)
@on_fake_ranks(8)
def test_bad_arguments_are_refused(kwargs, error, text):
    check_refused(error, text, model(), **kwargs)


@on_fake_ranks(8)
def test_a_dtype_of_its_own_for_gradients_is_not_built_for_replicate():
    net = model()
    net[1][0].bias.grad_dtype = torch.float64
    with pytest.raises(NotImplementedError, match=r"'1.0.bias', .*grad_dtype=torch.float64"):
        meshard.replicate(net)
    net[1][0].bias.grad_dtype = None  # any: that of the parameter
    net[1][0].weight.grad_dtype = torch.float32
    meshard.replicate(net)


@on_fake_ranks(8)
def test_a_scalar_parameter_is_refused_and_named():
    net = model()
    net[1].register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
    check_refused(ValueError, r"'1.temperature' is a scalar .* shape \(1,\)", net)
    meshard.fully_shard(net, ignored_params=iter([net[1].temperature]))
    assert type(net[1].temperature) is nn.Parameter
    assert type(net[0].weight) is not nn.Parameter


@on_fake_ranks(8)
def test_a_failure_while_sharding_leaves_the_module_as_it_was():
    net = model()

    def no_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshard._params.flat_params.UnshardedMemoryPool", no_memory)
        check_refused(torch.OutOfMemoryError, "no memory", net)
    meshard.fully_shard(net)
    net(torch.ones(1, 8)).sum().backward()


def test_gradients_and_buffers_have_floating_point_dtypes():
    for name in ("reduce_dtype", "buffer_dtype"):
        with pytest.raises(ValueError, match=f"{name} must be a floating-point dtype"):
            MixedPrecisionPolicy(**{name: torch.int32})


@on_fake_ranks(8)
def test_a_parameter_replaced_or_removed_after_sharding_is_named_at_the_next_use():
    net = meshard.fully_shard(model())
    net[0].weight = nn.Parameter(torch.ones(4, 8))
    text = r"'0.weight' of unit '\(root\)' was replaced .* \(4, 8\); .* shape \(8, 8\)"
    with pytest.raises(RuntimeError, match=text):
        net(torch.ones(1, 8))
    net = meshard.fully_shard(model())
    net[0].bias = None
    with pytest.raises(RuntimeError, match=r"'0.bias' was removed from its module"):
        net(torch.ones(1, 8))


@pytest.mark.parametrize(
    ("setter", "argument", "error", "text"),
    [
        ("set_modules_to_forward_prefetch", [nn.ReLU()], ValueError, "no unit in this ReLU"),
        ("set_reduce_scatter_max_input_buffers", 0, ValueError, "at least 1, got 0"),
        (
            "set_symm_mem_for_comm",
            "NCCL",
            NotImplementedError,
            "set_symm_mem_for_comm, .* not built",
        ),
    ],
)
@on_fake_ranks(8)
def test_setters_refuse_also_what_is_nearly_right(setter, argument, error, text):
    net = meshard.fully_shard(model())
    with pytest.raises(error, match=text):
        getattr(net, setter)(argument)


@on_fake_ranks(8)
def test_share_comm_ctx_refuses_a_module_without_units():
    with pytest.raises(ValueError, match="no unit in this ReLU"):
        meshard.share_comm_ctx([meshard.fully_shard(model()), nn.ReLU()])


def test_no_group_is_made_by_a_call_that_is_refused():
    with pytest.raises(ValueError, match="empty list"):
        meshard.fully_shard([])
    assert not dist.is_initialized()


@pytest.mark.parametrize("build", [meshard.overlap_optimizer, meshard.local_optimizer])
@on_fake_ranks(3)
def test_an_optimizer_in_the_place_of_its_class_is_explained(build):
    layer = meshard.fully_shard(nn.Linear(2, 2))
    wanted = rf"pass the class .* {build.__name__}\(module, AdamW, lr=\.\.\.\)"
    with pytest.raises(TypeError, match=wanted):
        build(layer, torch.optim.AdamW(layer.parameters()))


@pytest.mark.parametrize(
    ("max_norm", "expected"), [(float("inf"), 2.0), (0, 0.0), (torch.tensor(1.0), 1.0)]
)
def test_limits_that_torch_takes_are_taken(max_norm, expected):
    param = nn.Parameter(torch.ones(4))
    param.grad = torch.ones(4)
    assert meshard.clip_grad_norm_([param], max_norm, norm_type="2") == 2.0
    assert param.grad.norm().item() == pytest.approx(expected, abs=1e-5)


# Junk in every argument of every public function, class and method.

JUNK = {
    "None": None,
    "0": 0,
    "3": 3,
    "-1": -1,
    "nan": float("nan"),
    "text": "junk",
    "object": object(),
    "list": [object()],
    "tensor": torch.ones(3),
    "class": nn.Linear,
    "module": nn.ReLU,  # made anew for each call, which may change it
}
CALLABLE = "None class module"
# Names of arguments by what of JUNK they may be; what is not listed takes nothing of it.
TAKES_BY_JUNK = {
    "3": (
        "bucket_cap_mb bucket_mb growth_factor growth_interval init_scale max_input_buffers "
        "max_norm norm_type"
    ),
    "0 3 -1 nan": "min_params",
    "None": (
        "accumulate_dtype buffer_dtype clip dp_mesh_dims foreach "
        "gradient_dtype ignored_params master_dtype mesh offload_policy optimizer output_dtype "
        "param_dtype param_groups process_group reduce_dtype shard_placement_fn state_device "
        "stream wire_dtype"
    ),
    "None 3": "chunk_bytes clip_value max_unit_norm reshard_after_forward",
    "tensor": "tensors",
    "text": "path",
    "None text list": "replicate shard",  # the call of fully_shard compares them with the mesh
    "tensor module": "parameters",
    "text list tensor": "batches",
    CALLABLE: "hook init overrides param_dtype_override_fn select",
    "3 None class module": "factor",
    # The first step says it, or any value is true or false.
    " ".join(JUNK): (
        "async_op comm enable enabled event is_last_backward keep mode "
        "reduce_scatter_unused_params requires_all_reduce requires_gradient_sync state stream "
        "pin_memory sync_init unshard_in_backward unshard_on_access until_last"
    ),
}
TAKES = {name: junk for junk, names in TAKES_BY_JUNK.items() for name in names.split()}
# Where an argument means something else than elsewhere.
EXCEPT = {
    ("CommLedger", "module"): "None module",
    ("ShardPlacementResult", "mesh"): " ".join(JUNK),  # fully_shard refuses it
    ("ShardPlacementResult", "placement"): " ".join(JUNK),
    ("clip_grad_norm_", "max_norm"): "0 3",
    ("fully_shard", "module"): "module",
    ("fully_shard_units", "model"): "module",
    ("fully_shard_units", "units"): "module class",  # a predicate
    ("local_optimizer", "optimizer"): "",
    ("materialize", "module"): "module",
    ("describe", "module"): "module",
    ("overlap_optimizer", "optimizer"): "",
    ("owner_optimizer", "optimizer"): "",
    ("register_fsdp_forward_method", "module"): "module",
    ("register_reduce_hook", "hook"): "",
    ("replicate", "module"): "module",
    ("FSDPModule.set_reshard_after_forward", "reshard_after_forward"): "",
    ("FSDPModule.set_all_reduce_hook", "hook"): " ".join(JUNK),
    ("ReplicateModule.set_all_reduce_hook", "hook"): " ".join(JUNK),
    ("ReplicateModule.register_comm_hook", "hook"): "class module",
}


def sharded():
    return meshard.fully_shard(nn.Linear(2, 2))


# Arguments that must be given, and are not the one that is junk. Others are True.
VALID = {
    "batches": lambda: torch.ones(3, 2),
    "comm": mock.Mock,
    "event": lambda: torch.Event(),
    "factor": lambda: 2.0,
    "hook": mock.Mock,
    "max_input_buffers": lambda: 2,
    "max_norm": lambda: 1.0,
    "mesh": lambda: init_device_mesh("cpu", (3,)),
    "method_name": lambda: "unshard",
    "mode": lambda: GradientSync.FULL,
    "model": lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
    "modules": lambda: [sharded()],
    "optimizer": lambda: torch.optim.SGD,
    "parameters": sharded,
    "placement": lambda: Shard(0),
    "tensors": lambda: torch.ones(3),
}


NOT_CALLED_BY_USERS = {
    "FSDPModule", "GradientReductionHandle", "GradientSync", "OffloadPolicy", "OverlappedOptimizer",
    "OwnerOptimizer",
    "ReplicateModule", "UnshardHandle",
}  # fmt: skip
NAMES = [name for name in meshard.__all__ if name not in NOT_CALLED_BY_USERS]
NAMES += [
    f"{cls.__name__}.{name}"
    for cls in (FSDPModule, ReplicateModule)
    for name in dir(cls)
    if not name.startswith("_")
    and inspect.isfunction(getattr(cls, name))
    and getattr(cls, name).__module__.startswith("meshard")
]


def made(name):
    """Return what to call, and the parameters of its signature."""
    owner, _, method = name.partition(".")
    if owner == "FSDPModule":
        called = getattr(sharded(), method)
    elif owner == "ReplicateModule":
        called = getattr(meshard.replicate(nn.Linear(2, 2)), method)
    else:
        called = getattr(meshard, owner)
        called = getattr(called, method) if method else called
    parameters = [*inspect.signature(called).parameters.values()]
    return called, [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def module_for(name):
    return nn.Linear(2, 2) if name in ("fully_shard", "replicate") else sharded()


def is_taken(name, argument, junk):
    """Whether a call takes junk without an error."""
    called, parameters = made(name)
    given = {
        each.name: VALID.get(each.name, lambda: True)()
        for each in parameters
        if (each.default is each.empty or each.name == "hook") and each.name != "module"
    }
    if any(each.name == "module" for each in parameters):
        given.setdefault("module", module_for(name))
    given[argument] = junk() if junk is nn.ReLU else junk
    try:
        result = called(**given)
        if hasattr(result, "__enter__"):
            with result:
                pass
        elif hasattr(result, "__next__"):
            next(result)
    except Exception:
        return False
    return True


@pytest.mark.filterwarnings("ignore:call set_gradient_divide_factor:DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_junk_is_not_taken(name):
    taken = []
    with fake_group(3):
        for argument in (each.name for each in made(name)[1]):
            allowed = EXCEPT.get((name, argument), TAKES.get(argument, "")).split()
            for label in [label for label in JUNK if label not in allowed]:
                if is_taken(name, argument, JUNK[label]):
                    taken.append(f"{argument}={label}")
    assert not taken
