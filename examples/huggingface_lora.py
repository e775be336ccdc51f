"""LoRA on a frozen bfloat16 model of Hugging Face, sharded: transformers, peft and meshard.

python examples/huggingface_lora.py                         # one process
torchrun --nproc-per-node 2 examples/huggingface_lora.py    # each rank holds a half

It makes a small Llama in a folder itself; for yours, give its folder to ``from_pretrained``.
"""

from __future__ import annotations

import os
import pydoc_data.topics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from meshard import clip_grad_norm_, fully_shard
from meshard.checkpoint import stream_unsharded

STEPS, BATCH, CONTEXT = 20, 8, 64  # BATCH is that of all ranks together


def start() -> torch.device:
    """Join the ranks that torchrun has started; plain ``python`` is one rank."""
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def make_folder(folder: Path) -> None:
    """Write a small Llama over bytes, with random weights, as `from_pretrained` reads it."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256,
                         num_hidden_layers=3, num_attention_heads=4, use_cache=False)  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def batch(text: Tensor, step: int) -> Tensor:
    """Return this rank's rows of the batch of ``step``, which depends on the step alone."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
    rows = text[starts[:, None] + torch.arange(CONTEXT)]
    return rows.chunk(dist.get_world_size())[dist.get_rank()].long()


def train(base_folder: Path, adapter_folder: Path, device: torch.device) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.bfloat16)
    torch.manual_seed(1)  # every rank starts from the same adapters
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora).to(device)  # the base is frozen, adapters are float32
    whole = sum(param.nbytes for param in model.parameters())
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh)  # frozen and trainable parameters, of two dtypes, in one unit
    fully_shard(model, mesh)
    adapters = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)

    text = torch.tensor(list("".join(pydoc_data.topics.topics.values()).encode()))
    for step in range(STEPS):
        tokens = batch(text, step).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()  # only gradients of adapters are reduced
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == STEPS - 1:
            dist.all_reduce(mean := loss.detach() / ranks)
            if rank == 0:
                print(f"step {step:2}: loss {mean.item():.3f}", flush=True)

    # All ranks take part in gathering; the first one keeps the adapters and writes them.
    weights = {name: value.cpu() for name, value in stream_unsharded(model) if "lora_" in name}
    tokens = batch(text, STEPS).to(device)
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    if rank == 0:
        model.save_pretrained(str(adapter_folder), state_dict=weights)
        plain = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.bfloat16)
        plain = PeftModel.from_pretrained(plain, adapter_folder).to(device)  # no meshard in it
        same = torch.equal(plain(input_ids=tokens).logits, logits)
        params = [param for param in model.parameters() if isinstance(param, DTensor)]
        held = sum(param.to_local().nbytes for param in params)
        print(f"{ranks} ranks on {device.type}")
        print(f"parameters: {held / 2**20:.2f} of {whole / 2**20:.2f} MiB on the first rank")
        print(f"plain peft gives the same logits from the saved adapter: {'yes' if same else 'no'}")


def main() -> None:
    device = start()
    with tempfile.TemporaryDirectory() as temporary:
        folders = [temporary]
        dist.broadcast_object_list(folders)  # all ranks read the folder of the first
        base, adapter = Path(folders[0]) / "base", Path(folders[0]) / "adapter"
        if dist.get_rank() == 0:
            make_folder(base)
        dist.barrier()
        train(base, adapter, device)
        dist.barrier()  # no rank deletes a folder that another still reads
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
