"""Private names of torch: what they tell, and what happens where they are gone."""

import subprocess
import sys
import textwrap

import pytest

# Names for which there is a slower way.
WITH_FALLBACK = [
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch._C.DisableTorchFunctionSubclass",
    "torch.autograd._profiler_enabled",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._functorch.get_interpreter_stack",
    "torch._C._distributed_rpc._is_current_rpc_agent_set",
]
# Names that meshard cannot do without, and what uses them.
WITH_ERROR = {
    "torch._foreach_copy_": "foreach_copy_([], [])",
    "torch._foreach_mul_": "foreach_mul_([], 1.0)",
    "torch._chunk_cat": "chunk_cat([], 0, 1)",
    "torch.utils._pytree.tree_flatten": "tree_flatten([])",
    "torch._C._current_graph_task_id": "graph_task_id()",
    "torch._C._autograd._get_current_graph_task_keep_graph": "keeps_graph()",
    "torch._C._autograd._get_sequence_nr": "next_node()",
    "torch.autograd.grad_mode._unsafe_preserve_version_counter": "keeping_version(torch.ones(1))",
    "torch._amp_foreach_non_finite_check_and_unscale_": "unscale_each([], None, None)",
    "torch.distributed.device_mesh.DeviceMesh._concatenate": "concatenate_meshes([])",
    "torch.distributed.device_mesh.DeviceMesh._flatten": "flatten_mesh(None)",
    "torch.distributed.tensor.placement_types._StridedShard": "strided_shard(0, split_factor=2)",
}

SCRIPT = """
import sys, torch, torch.distributed.tensor
import torch._dynamo  # before names are taken away: torch needs them too


def import_without(paths):
    taken = []
    for path in paths:
        *parts, name = path.split(".")
        holder = torch
        for part in parts[1:]:
            holder = getattr(holder, part)
        taken.append((holder, name, getattr(holder, name)))
        delattr(holder, name)
    for name in [name for name in sys.modules if name.startswith("meshard")]:
        del sys.modules[name]
    import meshard
    return meshard, lambda: [setattr(*each) for each in taken]


meshard, put_back = import_without({with_fallback!r} + list({with_error!r}))
from meshard._torch import private
for path, call in {with_error!r}.items():
    try:
        eval(call, {{**vars(private), "torch": torch}})
    except AttributeError as error:
        assert path.split(".")[-1] in str(error), error
    else:
        raise AssertionError(path)
put_back()

meshard, put_back = import_without({with_fallback!r})
put_back()  # for torch's own use
model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
for layer in model:
    meshard.fully_shard(layer)
meshard.fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 3)).sum().backward()
    meshard.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
print("trained")
"""


@pytest.mark.slow
def test_import_needs_none_of_them_and_errors_name_what_is_missing():
    script = textwrap.dedent(SCRIPT).format(with_fallback=WITH_FALLBACK, with_error=WITH_ERROR)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.endswith("trained\n"), done.stderr
