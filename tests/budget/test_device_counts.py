"""What a step adds to the plain one on a device, beside FSDP2: a fake device, a pretended network.

Run with ``-s`` to see the table. Kernels are counted as CUDA's operators launch them.
"""

import gc
from collections import Counter

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshard
from examples.train_gpt import GPT, GPTConfig
from tests.benchmarks.pretend_network import NOTHING, pretend_group
from tests.support import insides
from tests.support.fake_device import FakeDevice

COUNTED = ("operators", "kernels", "copies", "allocations", "MiB", "waits")
NO_KERNEL = ("empty", "detach", "set_", "_unsafe_view", "promote_types")
COPIES = ("copy", "cat", "clone", "split")
MIB = 2**20
COUNTS_MIB = 0.002  # a number for each parameter tells whether a rank has used it; FSDP2 has none

# What is above FSDP2's. In units with parameters that ranks do not divide, each parameter is copied
# out by itself; FSDP2 pads unsharded parameters to as many rows as there are ranks, and copies all
# by one kernel: see MiB.
ABOVE = {
    ((4096,), True): {"kernels": 23, "copies": 20},
    ((4096,), False): {"kernels": 13, "copies": 10},
    ((2, 2048), True): {"kernels": 26, "copies": 20},
}


def tensors_in(*values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def is_dense(tensor):
    return torch.ops.aten.is_non_overlapping_and_dense(tensor)


def num_kernels(name, args, kwargs):
    """Return how many kernels CUDA runs; those of several tensors are one if these are alike."""
    if name.startswith("_foreach_"):
        targets, sources = args[:2]
        alike = all(
            (one.shape, one.stride()) == (other.shape, other.stride()) and is_dense(one)
            for one, other in zip(targets, sources, strict=True)
        )
        return 1 if alike else len(targets)
    if name == "split_with_sizes_copy":
        return 1 if all(map(is_dense, (args[0], *kwargs["out"]))) else len(kwargs["out"])
    if name == "_chunk_cat":
        is_fast = all(each.is_contiguous() for each in (*args[0], kwargs["out"]))
        return 1 if is_fast else 1 + len(args[0])
    return 1


class Counts(TorchDispatchMode):
    """Counts operators, and what a device does for them."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "fsdp":  # written in Python: it calls others, which count
            with self:
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        known = {each.untyped_storage()._cdata for each in tensors_in(args, kwargs)}
        result = func(*args, **kwargs)
        if func.namespace == "aten":
            self.counts["operators"] += 1
            for each in tensors_in(result):
                if each.untyped_storage()._cdata not in known:
                    self.allocated(each.untyped_storage().nbytes())
            name = func._schema.name.removeprefix("aten::")
            if not func.is_view and not any(part in name for part in NO_KERNEL):
                kernels = num_kernels(name, args, kwargs)
                self.counts["kernels"] += kernels
                self.counts["copies"] += kernels * any(part in name for part in COPIES)
        return result

    def allocated(self, num_bytes):
        self.counts["allocations"] += num_bytes > 0
        self.counts["MiB"] += num_bytes / MIB


def counts_of_a_step(shard, mesh_shape, reshards, monkeypatch):
    gc.collect()
    device, num_ranks = FakeDevice(), torch.Size(mesh_shape).numel()
    with monkeypatch.context() as patch, pretend_group(num_ranks, NOTHING):
        insides.use_streams(patch, device)
        for name in ("Stream", "Event", "current_stream", "stream"):  # of FSDP2
            patch.setattr(torch.cpu, name, getattr(device, name))
        names = ("replicate", "shard")[-len(mesh_shape) :]
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        model = GPT(GPTConfig(width=256, depth=2, context=16, heads=4, shifts_tokens=False))
        for module in (*model.blocks, model) if shard else ():
            shard(module, mesh=mesh, reshard_after_forward=reshards)
        tokens = torch.zeros(1, 16, dtype=torch.long)

        def step():
            model(tokens).sum().backward()
            model.zero_grad()

        for _ in range(2):
            step()
        resize, waits = torch.UntypedStorage.resize_, device.num_waits + device.num_host_waits
        with Counts() as seen:

            def counted(storage, num_bytes):
                if num_bytes > storage.nbytes():
                    seen.allocated(num_bytes)
                return resize(storage, num_bytes)

            patch.setattr(torch.UntypedStorage, "resize_", counted)
            step()
    seen.counts["waits"] = device.num_waits + device.num_host_waits - waits
    return seen.counts


def added(shard, *case):
    """Return the counts of a step without those of the plain one."""
    counts = counts_of_a_step(shard, *case)
    counts.subtract(counts_of_a_step(None, *case))
    return counts


@pytest.mark.parametrize(
    ("mesh_shape", "reshards"),
    [
        ((8,), True),
        ((8,), False),
        ((2, 4), True),
        ((4096,), True),
        ((4096,), False),
        ((2, 2048), True),
    ],
    ids=str,
)
def test_a_step_on_a_device_does_no_more_than_that_of_fsdp2(monkeypatch, mesh_shape, reshards):
    ours = added(meshard.fully_shard, mesh_shape, reshards, monkeypatch)
    theirs = added(torch_fully_shard, mesh_shape, reshards, monkeypatch)
    cells = [f"{name} {ours[name]:.0f} / {theirs[name]:.0f}" for name in COUNTED]
    print(f"\n{mesh_shape}, {'' if reshards else 'not '}resharding: {', '.join(cells)}")
    above = {"MiB": COUNTS_MIB} | ABOVE.get((mesh_shape, reshards), {})
    for name in COUNTED:
        assert ours[name] <= theirs[name] + above.get(name, 0), name
