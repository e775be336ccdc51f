"""Use this to test that no memory is left behind: bytes of the tensors that are alive."""

import gc
import time

import torch
from torch._subclasses.fake_tensor import FakeTensor


def live_tensor_bytes() -> int:
    """Return the bytes of the storages of all tensors that are alive in this process."""
    seen, total = set(), 0
    for thing in gc.get_objects():
        # Compiling leaves fake tensors behind, whose sizes may be symbols.
        is_real = isinstance(thing, torch.Tensor) and not isinstance(thing, FakeTensor)
        if is_real and not thing.is_meta:
            local = getattr(thing, "_local_tensor", thing)
            storage = local.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
    return total


def settled_tensor_bytes() -> int:
    """Return the same, once gloo's threads have dropped the works that are over."""
    torch.distributed.barrier()
    time.sleep(0.2)
    gc.collect()
    return live_tensor_bytes()
