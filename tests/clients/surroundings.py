"""What clients expect around them: GPUs, and files that their packages do not have."""

import json
import os
import random
import sys
import types
from pathlib import Path
from unittest import mock


def prepare(code: str) -> None:
    """Let the libraries that ``code`` uses treat ranks of the CPU like those of GPUs."""
    if "accelerate" in code or "Trainer" in code:
        _prepare_accelerate()
    if "torchtitan" in code:
        _prepare_torchtitan()
        _write_assets_of_torchtitan(Path("tests/assets"))


def _prepare_accelerate() -> None:
    """Shard on CPUs too: accelerate, and with it the Trainer of transformers, does not."""
    from accelerate.state import DistributedType, PartialState

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)


def _prepare_torchtitan() -> None:
    """Let torchtitan take the CPU for its device, without kernels of Triton and flex attention."""
    import torch
    from torch.nn.attention import flex_attention

    torch._utils._get_available_device_type = lambda: "cpu"
    told = types.SimpleNamespace(total_memory=2**34)
    answers = {
        "current_device": 0,
        "device_count": 1,
        "get_device_name": "cpu",
        "get_device_properties": told,
        "memory_stats": {},
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "set_device": None,
    }
    for name, answer in answers.items():
        setattr(torch.cpu, name, lambda *_, answer=answer: answer)
    if not hasattr(torch.distributed, "set_timeout"):  # of a newer torch
        torch.distributed.set_timeout = lambda *_: None
    os.environ["HF_HOME"] = str(Path("hub").resolve())  # where data sets are unpacked
    flex_attention.flex_attention = torch.compiler.disable(_dense_attention)
    for package in ("distributed.minimal_async_ep", "models.moe"):
        sys.modules[f"torchtitan.{package}.kernels"] = mock.MagicMock()


def _dense_attention(q, k, v, *, block_mask, scale, enable_gqa, **_):
    import torch
    from torch.nn.attention.flex_attention import create_mask

    mask = create_mask(block_mask.mask_mod, 1, 1, q.shape[-2], k.shape[-2], device="cpu")
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    )
    return out, types.SimpleNamespace(lse=None)


def _write_assets_of_torchtitan(folder: Path) -> None:
    """Write a tokenizer and texts where the debug model looks for those of the repository."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    choose = random.Random(0).choices
    words = ["".join(choose("abcdefghijklmnop", k=5)) for _ in range(400)]
    texts = [" ".join(choose(words, k=80)) for _ in range(400)]
    (folder / "c4_test").mkdir(parents=True)
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "c4_test" / "data.json").write_text("\n".join(lines))

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=[begin, end],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    config = {"bos_token": begin, "eos_token": end, "add_bos_token": True, "add_eos_token": True}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
