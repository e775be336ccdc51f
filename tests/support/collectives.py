"""Use ``Collectives`` to count what a library asks of process groups; ours has ``CommLedger``."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


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
