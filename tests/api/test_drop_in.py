"""A training script that moves over by changing one import.

One script as text is run as it is with torch's library and with ours, on the same ranks.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.parity import assert_same
from tests.support.ranks import on_ranks

SCRIPT = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from LIBRARY import FSDPModule, MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    def __init__(self, dim, recompute):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.recompute = recompute

    def inner(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x):
        if self.recompute:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)


class Model(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(Block(16, recompute) for _ in range(3))
        self.head = nn.Linear(16, 11)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(mesh, reshard, dtypes, recompute, rank):
    torch.manual_seed(0)
    model = Model(recompute)
    kwargs = dict(
        mesh=mesh, reshard_after_forward=reshard, mp_policy=MixedPrecisionPolicy(**dtypes)
    )
    for block in model.blocks:
        fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(2):
        for number in range(3):
            is_last = number == 2
            model.set_is_last_backward(is_last)
            model.set_requires_all_reduce(is_last)
            generator = torch.Generator().manual_seed(100 * step + 10 * number + rank)
            tokens = torch.randint(0, 11, (2, 5), generator=generator)
            logits = model(tokens).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())
            loss.backward()
            found.append(loss.detach())
        found += [param.grad.full_tensor() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    found += [param.full_tensor().detach() for param in model.parameters()]
    return found
"""


class Collectives(TorchDispatchMode):
    """Counts collectives of the process group, and the bytes of their whole buffers."""

    # gloo has no fast reduce-scatter: ours is an all-to-all of the same buffer and a local sum
    KINDS = (("allgather", "gather"), ("reduce_scatter", "scatter"), ("alltoall", "scatter"))
    KINDS += (("allreduce", "all_reduce"),)

    def __init__(self):
        super().__init__()
        self.counts, self.bytes = {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith("c10d."):
            kind = next((kind for part, kind in self.KINDS if part in name), name)
            tensors = [t for t in torch.utils._pytree.tree_leaves(args[:2]) if torch.is_tensor(t)]
            if all(tensor.dtype == torch.int64 for tensor in tensors):
                # Ranks that introduce themselves, once per model: see exchange_numbers.
                return func(*args, **(kwargs or {}))
            self.counts[kind] = self.counts.get(kind, 0) + 1
            self.bytes[kind] = self.bytes.get(kind, 0) + max(t.nbytes for t in tensors)
        return func(*args, **(kwargs or {}))


def run_script(library, mesh, reshard, dtypes, recompute):
    namespace = {"__name__": "script"}
    exec(SCRIPT.replace("LIBRARY", library), namespace)  # the script is ours
    with Collectives() as collectives:
        found = namespace["train"](mesh, reshard, dtypes, recompute, dist.get_rank())
    return found, collectives


BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@pytest.mark.parametrize(
    ("mesh_shape", "sends", "reshard", "dtypes", "recompute"),
    [
        ((2, 2), True, 2, BF16, True),
        # Ranks that read one another's memory send nothing.
        pytest.param((4,), False, True, {}, False, marks=pytest.mark.slow),
        pytest.param((2, 2), False, True, BF16, True, marks=pytest.mark.slow),
        pytest.param((4,), True, False, {}, True, marks=pytest.mark.slow),
    ],
)
@on_ranks(4)
def test_one_changed_import_gives_the_same_training_with_no_more_communication(
    mesh_shape, sends, reshard, dtypes, recompute
):
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peer warns of outputs that are views
        theirs, peer = run_script("torch.distributed.fsdp", mesh, reshard, dtypes, recompute)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHARD_SHARED_MEMORY", str(int(not sends)))
        ours, mine = run_script("meshard", mesh, reshard, dtypes, recompute)
    dtype = torch.bfloat16 if dtypes else torch.float32
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(one, other, dtype, what=f"value {number}")
    for kind, count in mine.counts.items():
        assert count <= peer.counts.get(kind, 0), f"{mine.counts} {peer.counts}"
        assert mine.bytes[kind] <= peer.bytes[kind], f"{mine.bytes} {peer.bytes}"
    if sends:
        assert mine.counts["gather"] > 6
