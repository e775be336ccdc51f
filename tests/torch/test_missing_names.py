"""Private names of torch that are gone."""

import subprocess
import sys
import textwrap

# Names for which there is a slower way. They are back after the import, for torch's own use.
WITH_FALLBACK = [
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._foreach_copy_",
    "torch._foreach_mul_",
    "torch._chunk_cat",
    "torch.autograd._profiler_enabled",
]
# Names that meshard cannot do without, and what uses them.
WITH_ERROR = {
    "torch._C._current_graph_task_id": "graph_task_id()",
    "torch._C._autograd._get_current_graph_task_keep_graph": "keeps_graph()",
    "torch._C._autograd._get_sequence_nr": "next_node()",
    "torch.autograd.grad_mode._unsafe_preserve_version_counter": "keeping_version(torch.ones(1))",
    "torch._amp_foreach_non_finite_check_and_unscale_": "unscale_each([], None, None)",
    "torch.distributed.device_mesh.DeviceMesh._concatenate": "concatenate_meshes([])",
    "torch.distributed.device_mesh.DeviceMesh._flatten": "flatten_mesh(None)",
    "torch.distributed.tensor.placement_types._StridedShard": "strided_shard(0, 2)",
}

SCRIPT = """
import importlib, torch, torch.distributed.tensor
import torch._dynamo  # before names are taken away: torch needs them too


def holder_of(path):
    parts = path.split(".")
    value = torch
    for part in parts[1:-1]:
        value = getattr(value, part)
    return value, parts[-1]


def take(path):
    holder, name = holder_of(path)
    value = getattr(holder, name)
    delattr(holder, name)
    return holder, name, value


taken = [take(path) for path in {with_fallback!r} + list({with_error!r})]
from meshard._torch import private
import meshard
for holder, name, value in taken:
    setattr(holder, name, value)

for path, call in {with_error!r}.items():
    holder, name, value = take(path)
    try:
        eval(call, {{**vars(private), "torch": torch}})
    except AttributeError as error:
        assert name in str(error), error
    else:
        raise AssertionError(path)
    setattr(holder, name, value)

model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
for layer in model:
    meshard.fully_shard(layer)
meshard.fully_shard(model)
try:
    private._or_error("torch.utils._pytree.never_there")([1])
except AttributeError as error:
    assert "torch.utils._pytree.never_there" in str(error)
else:
    raise AssertionError
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 3)).sum().backward()
    meshard.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
print("trained")
"""


def test_import_needs_none_of_them_and_errors_name_what_is_missing():
    script = textwrap.dedent(SCRIPT).format(with_fallback=WITH_FALLBACK, with_error=WITH_ERROR)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.endswith("trained\n"), done.stderr
