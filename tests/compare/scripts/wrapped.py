"""What a user of DDP trains: buffers, windows by both forms of ``no_sync``, a hook on request."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
inner = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 4))
model = DDP(inner, bucket_cap_mb=1, gradient_as_bucket_view=True)
if "--hook" in sys.argv:
    model.register_comm_hook(None, fp16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
torch.manual_seed(1 + dist.get_rank())
for step in range(9):
    model.train()
    x = torch.randn(2, 8, 16)
    if step % 2:
        with model.no_sync():
            model(x[0]).square().mean().backward()
    else:
        before = model.require_backward_grad_sync
        model.require_backward_grad_sync = False  # as trainers do
        model(x[0]).square().mean().backward()
        model.require_backward_grad_sync = before
    model(x[1]).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
