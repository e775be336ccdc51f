"""Junk in every argument of every public function, class and method: refused, by us, in words."""

import inspect
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import meshard
from meshard import FSDPModule, GradientSync, ReplicateModule
from tests.support.fake import fake_group

SRC = str(Path(meshard.__file__).parent)
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
# What of JUNK an argument of that name may be; one that is not listed, nothing.
TAKES = {
    "accumulate_dtype": "None",
    "batches": "text list tensor",  # any iterable
    "bucket_cap_mb": "3",
    "buffer_dtype": "None",
    "clip": "None",
    "clip_value": "None 3",
    "dp_mesh_dims": "None",
    "factor": "3 None class module",  # a callable is read later
    "foreach": "None",
    "hook": CALLABLE,
    "ignored_params": "None",
    "init": CALLABLE,
    "max_input_buffers": "3",
    "max_norm": "3",
    "max_unit_norm": "None 3",
    "mesh": "None",
    "min_params": "0 3",
    "norm_type": "3",
    "offload_policy": "None",
    "optimizer": "None",
    "output_dtype": "None",
    "overrides": CALLABLE,
    "param_dtype": "None",
    "param_dtype_override_fn": CALLABLE,
    "param_groups": "None",
    "parameters": "tensor module",
    "process_group": "None",
    "reduce_dtype": "None",
    "replicate": "None text",
    "reshard_after_forward": "None 3",  # 3 of the 3 ranks
    "shard": "None text",
    "shard_placement_fn": "None",
    "state": " ".join(JUNK),  # the hook's own
    "stream": "None",
    "tensors": "tensor",
    "growth_interval": "3",
    "growth_factor": "3",
    "init_scale": "3",
}
# Where an argument means something else than elsewhere.
EXCEPT = {
    ("CommLedger", "module"): "None module",
    ("ShardPlacementResult", "mesh"): "",
    ("clip_grad_norm_", "max_norm"): "0 3",
    ("fully_shard", "module"): "module",
    ("fully_shard_units", "model"): "module",
    ("fully_shard_units", "units"): "module class",  # a predicate
    ("flat_optimizer", "optimizer"): "",
    ("get_total_norm", "tensors"): "tensor",
    ("materialize", "module"): "module",
    ("describe", "module"): "module",
    ("overlap_optimizer", "max_norm"): "None",
    ("overlap_optimizer", "optimizer"): "",
    ("register_fsdp_forward_method", "module"): "module",
    ("register_reduce_hook", "hook"): "",
    ("register_reduce_hook", "wire_dtype"): "None",
    ("replicate", "module"): "module",
    ("OverlappedOptimizer.attached_to", "module"): "module",
    ("FSDPModule.set_reshard_after_forward", "reshard_after_forward"): "",
    ("FSDPModule.set_custom_all_gather", "comm"): "None",
    ("FSDPModule.set_custom_reduce_scatter", "comm"): "None",
    ("FSDPModule.set_custom_all_reduce", "comm"): "None class module",
    ("ReplicateModule.set_custom_all_reduce", "comm"): "None class module",
    ("ReplicateModule.register_comm_hook", "hook"): "class module",
    ("FSDPModule.set_symm_mem_for_comm", "backend"): " ".join(JUNK),  # refused in any case
}


class Wide(nn.Linear):
    def extra(self, x):
        return self(x)


class Useful:
    """A communication, and a hook of either kind."""

    def __call__(self, *args, **kwargs):
        pass

    def allocate(self, *args, **kwargs):
        pass

    after = __call__


def sharded():
    return meshard.fully_shard(Wide(2, 2))


# Arguments that must be given, and are not the one that is junk. Others are True.
VALID = {
    "backend": lambda: "NCCL",
    "batches": lambda: torch.ones(3, 2),
    "comm": Useful,
    "dtype": lambda: torch.bfloat16,
    "event": lambda: torch.Event(),
    "factor": lambda: 2.0,
    "hook": Useful,
    "max_input_buffers": lambda: 2,
    "max_norm": lambda: 1.0,
    "mesh": lambda: init_device_mesh("cpu", (3,)),
    "method_name": lambda: "extra",
    "mode": lambda: GradientSync.FULL,
    "model": lambda: nn.Sequential(Wide(2, 2), Wide(2, 2)),
    "modules": lambda: [sharded()],
    "optimizer": lambda: torch.optim.SGD,
    "parameters": sharded,
    "placement": lambda: Shard(0),
    "shard": lambda: "data",
    "tensors": lambda: torch.ones(3),
}


NOT_CALLED_BY_USERS = {
    "FSDPModule", "GradientReductionHandle", "GradientSync", "OffloadPolicy", "OverlappedOptimizer",
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
NAMES += ["OverlappedOptimizer.attached_to"]


def made(name):
    """Return what to call, and the parameters of its signature."""
    owner, _, method = name.partition(".")
    if owner == "FSDPModule":
        called = getattr(sharded(), method)
    elif owner == "ReplicateModule":
        called = getattr(meshard.replicate(Wide(2, 2)), method)
    else:
        called = getattr(meshard, owner)
        called = getattr(called, method) if method else called
    parameters = [*inspect.signature(called).parameters.values()]
    if owner == "ShardedGradScaler":  # it passes them on
        parameters += inspect.signature(torch.amp.GradScaler).parameters.values()
    return called, [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def module_for(name):
    if name == "uneven_batches":
        return meshard.replicate(Wide(2, 2))
    return Wide(2, 2) if name in ("fully_shard", "replicate") else sharded()


def problem(name, argument, junk):
    """Return what is wrong with how junk is refused; None if nothing is."""
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
    except (TypeError, ValueError, NotImplementedError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if not last.filename.startswith(SRC):
            return f"{last.filename} says {error}"
        is_python = any(text in str(error) for text in ("has no attribute", "is not iterable"))
        return f"Python says {error}" if is_python else None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.filterwarnings("ignore:call set_gradient_divide_factor:DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_junk_is_refused_by_us_in_words(name):
    problems = []
    with fake_group(3):
        for argument in (each.name for each in made(name)[1]):
            taken = EXCEPT.get((name, argument), TAKES.get(argument, "")).split()
            for label in [label for label in JUNK if label not in taken]:
                found = problem(name, argument, JUNK[label])
                if found is not None:
                    problems.append(f"{argument}={label}: {found}")
    assert not problems, "\n".join(problems)


def test_ignored_params_may_be_any_iterable_of_parameters():
    layer = Wide(2, 2)
    with fake_group(3):
        meshard.fully_shard(layer, ignored_params=iter([layer.bias]))
    assert type(layer.bias) is nn.Parameter and type(layer.weight) is not nn.Parameter


@pytest.mark.parametrize("build", [meshard.overlap_optimizer, meshard.flat_optimizer])
def test_an_optimizer_in_the_place_of_its_class_is_explained(build):
    with fake_group(3):
        layer = sharded()
        optimizer = torch.optim.AdamW(layer.parameters())
        wanted = rf"pass the class .* {build.__name__}\(module, AdamW, lr=\.\.\.\)"
        with pytest.raises(TypeError, match=wanted):
            build(layer, optimizer)


@pytest.mark.parametrize(
    ("max_norm", "expected"), [(float("inf"), 2.0), (0, 0.0), (torch.tensor(1.0), 1.0)]
)
def test_limits_that_torch_takes_are_taken(max_norm, expected):
    param = nn.Parameter(torch.ones(4))
    param.grad = torch.ones(4)
    assert meshard.clip_grad_norm_([param], max_norm, norm_type="2") == 2.0
    assert param.grad.norm().item() == pytest.approx(expected, abs=1e-5)
