"""What clients do only where they find GPUs, done on the CPU."""

import os


def pretend_to_have_gpus(code: str) -> None:
    """Let the libraries that ``code`` uses treat ranks of the CPU like those of GPUs.

    accelerate, and with it the Trainer of transformers, does not shard where ranks are CPUs.
    """
    if "accelerate" in code or "Trainer" in code:
        from accelerate.state import DistributedType, PartialState

        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
