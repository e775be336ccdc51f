"""What a user of FSDP2 trains: layers, a root, two microbatches.

``--fault`` plants one that meshard's units get only, in the unit ``1``.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--fault")
parser.add_argument("--reduce-dtype")
args = parser.parse_args()
fault = args.fault if fully_shard.__module__.startswith("meshard") else None
reduce_dtype = getattr(torch, args.reduce_dtype) if args.reduce_dtype else None

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))
model.append(nn.Linear(16, 4))
for number, layer in enumerate(model):
    is_other = fault == "dtype" and number == 1
    reduced_in = torch.bfloat16 if is_other else reduce_dtype
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduced_in))
fully_shard(model)
if fault == "factor":
    model[1].set_gradient_divide_factor(4.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(1 + dist.get_rank())
for _ in range(9):
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        model(torch.randn(8, 16)).square().mean().backward()
    if fault == "lost":
        model[1][0].bias.grad = None
    if fault == "nan":
        model[1][0].bias.grad.mul_(torch.nan)
    if fault == "raise":
        raise ArithmeticError("with meshard only")
    optimizer.step()
    optimizer.zero_grad()
    if fault == "stop":
        break
