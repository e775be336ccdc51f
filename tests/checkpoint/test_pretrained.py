"""Weights in safetensors files: written by all ranks, read by each in part."""

import contextlib
import copy
import io
import itertools
import json
import os
import re
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

import meshard
import meshard.checkpoint.__main__ as command
from meshard.checkpoint import (
    Checkpointer,
    load_pretrained,
    meta_parameters,
    pretrained,
    progress,
    save_pretrained,
    stream_unsharded,
    weights_files,
)
from tests.checkpoint.layouts import LAYOUTS, lay_out
from tests.support.cases import CASES
from tests.support.models import seeded
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks
from tests.support.spread import mostly_slow, spread

pytestmark = pytest.mark.extras  # safetensors


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "saved")


def parts_of(path):
    """Read a file by its specification: the header, and the number of bytes of data."""
    data = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), len(data) - 8 - length


def without_ties(module):
    """Return the state of a plain module, each parameter under its first name."""
    state = module.state_dict(keep_vars=True)
    first = {}
    for name, value in state.items():
        first.setdefault(id(value), name)
    return {name: state[name].detach() for name in first.values()}


def read_all(folder):
    from safetensors.torch import load_file

    paths = sorted(Path(folder).glob("*.safetensors"))
    return {name: value for path in paths for name, value in load_file(path).items()}


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def write_plain(module, path, **changes):
    """Write a file with safetensors, without ties; ``changes`` are made to it (None: left out)."""
    from safetensors.torch import save_file

    state = {**without_ties(module), **changes}
    save_file({k: v.contiguous() for k, v in state.items() if v is not None}, path)


@on_ranks(4)
@pytest.mark.parametrize("name", mostly_slow(LAYOUTS, "buffers", "hsdp"))
def test_what_is_saved_is_read_by_safetensors_and_fills_a_model(name, folder):
    model, plain = lay_out(name)
    params = dict(model.named_parameters())
    if name == "plain":  # else all ranks write one folder
        folder = f"{folder}/{dist.get_rank()}"
    for size, dtype in ((400, torch.bfloat16), (400, None), ("5GB", None)):
        save_pretrained(model, folder, max_shard_size=size, dtype=dtype)
        dist.barrier()
        expected = {
            key: value.to(dtype) if dtype and value.is_floating_point() else value
            for key, value in without_ties(plain).items()
        }
        found = read_all(folder)
        assert found.keys() == expected.keys()
        assert_same({key: found[key] for key in expected}, expected, bitwise=True)
        if dtype is None:
            spoil(model)
            report = load_pretrained(model, folder)
            assert report == (list(plain.state_dict()), [], [])
            assert_same(full_state(model), full_state(plain), bitwise=True)
        dist.barrier()
    assert all(param is params[key] for key, param in model.named_parameters())


def test_a_plain_module_is_saved_without_a_process_group(folder):
    save_pretrained(CASES["mlp_stack"].build(), folder)
    header, num_bytes = parts_of(f"{folder}/model.safetensors")
    assert header.pop("__metadata__") == {"format": "pt"}
    assert header["blocks.0.up.weight"]["shape"] == [10, 6]
    assert header["blocks.0.up.weight"]["dtype"] == "F32"
    ends = sorted(entry["data_offsets"] for entry in header.values())
    assert ends[0][0] == 0 and ends[-1][1] == num_bytes
    assert all(one[1] == two[0] for one, two in itertools.pairwise(ends))
    assert os.listdir(folder) == ["model.safetensors"]


@pytest.mark.parametrize("most", [5 * 10**9, 300])
def test_the_command_exports_a_checkpoint_as_such_files(most, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_FILE_BYTES", most)
    plain = seeded(nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9), nn.Linear(9, 1).bfloat16()))
    optimizer = torch.optim.SGD(plain.parameters())
    Checkpointer(tmp_path / "run").save(1, plain, optimizer, x=torch.ones(2))
    assert command.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert ("model.safetensors.index.json" in contents(tmp_path / "out")) is (most == 300)
    found = read_all(tmp_path / "out")
    assert_same(
        {name: found[name] for name in plain.state_dict()}, plain.state_dict(), bitwise=True
    )
    loaded = copy.deepcopy(plain)
    spoil(loaded)
    assert load_pretrained(loaded, tmp_path / "out").missing == []
    assert_same(loaded.state_dict(), plain.state_dict(), bitwise=True)


@on_ranks(2)
def test_files_have_at_most_the_size_the_index_names_all_and_those_of_an_older_save_go(folder):
    model, plain = lay_out("mixed_dtype")
    for size in (60, "5GB", 200, 60):
        save_pretrained(model, folder, max_shard_size=size)
        dist.barrier()
        names = sorted(os.listdir(folder))
        if size == "5GB":
            assert names == ["model.safetensors"]
            dist.barrier()
            continue
        index = json.loads(Path(folder, names.pop()).read_text())
        count = len(names)
        assert count >= 2 and names[0] == f"model-00001-of-{count:05}.safetensors"
        assert set(index["weight_map"]) == set(plain.state_dict())
        assert set(index["weight_map"].values()) == set(names)
        total = 0
        for file in names:
            header, num_bytes = parts_of(f"{folder}/{file}")
            header.pop("__metadata__")
            assert num_bytes <= size or len(header) == 1
            assert all(index["weight_map"][name] == file for name in header)
            offsets = [(entry["data_offsets"][0], entry["dtype"]) for entry in header.values()]
            assert all(offset % 4 == 0 for offset, dtype in offsets if dtype == "F32")
            total += num_bytes
        assert index["metadata"]["total_size"] == total
        dist.barrier()


class Config:
    """What ``save_pretrained`` calls of a configuration."""

    error, text = None, "{}"

    def save_pretrained(self, folder):
        if self.error is not None:
            raise self.error
        Path(folder, "config.json").write_text(self.text)


@on_ranks(2)
@spread(what=["tensor", "config"], failing=[0, 1, 0], size=[500, 500, "5GB"])
def test_a_writer_that_fails_raises_on_all_ranks_and_leaves_the_folder(what, failing, size, folder):
    model, _ = lay_out("sharded")
    model.config = Config()
    save_pretrained(model, folder, max_shard_size=size)
    dist.barrier()
    before = contents(folder)
    assert before["config.json"] == b"{}"
    real, count = weights_files.write_tensor, 0

    def write(file, tensor):
        nonlocal count
        count += 1
        if dist.get_rank() == failing and count == 3:
            raise OSError("no space left")
        real(file, tensor)

    failing = 0 if what == "config" else failing  # which the first rank writes
    with pytest.MonkeyPatch.context() as patch:
        if what == "config":
            model.config.error = OSError("no space left")
        else:
            patch.setattr("meshard.checkpoint.pretrained.write_tensor", write)
        expected = OSError if dist.get_rank() == failing else RuntimeError
        with pytest.raises(expected, match=f"no space|failed on rank {failing}"):
            save_pretrained(model, folder, max_shard_size=size)
    dist.barrier()
    assert contents(folder) == before


class KilledError(BaseException):
    """A stand-in for the death of the process."""


def kill_at(moment, model, folder, size):
    """Save, and die at the n-th rename, removal or sync; return whether it died."""
    moments = itertools.count(1)

    def dying(real):
        def act(*args, **kwargs):
            if next(moments) == moment:
                raise KilledError
            return real(*args, **kwargs)

        return act

    clean_up = pretrained._Save.__exit__

    def unless_dead(self, kind, *rest):
        return None if kind is KilledError else clean_up(self, kind, *rest)

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((os, "replace"), (Path, "unlink"), (os, "fsync")):
            patch.setattr(owner, name, dying(getattr(owner, name)))
        patch.setattr(pretrained._Save, "__exit__", unless_dead)
        try:
            save_pretrained(model, folder, max_shard_size=size)
        except KilledError:
            return True
    return False


@spread(old=[300, "5GB", 300], new=[500, "5GB", "5GB"])
def test_a_save_that_is_killed_is_never_taken_for_complete(old, new, tmp_path):
    first, second = CASES["uneven"].build(), seeded(CASES["uneven"].build(), seed=5)
    from safetensors.torch import load_file

    first.config, second.config = Config(), Config()
    second.config.text = '{"new": 1}'
    moments = 0
    for moment in range(1, 100):
        folder = tmp_path / f"{moment}"
        save_pretrained(first, folder, max_shard_size=old)
        died = kill_at(moment, second, folder, new)
        # Some readers take every file.
        found = [pair for path in folder.glob("*.safetensors") for pair in load_file(path).items()]
        assert any(
            all(torch.equal(value, saved.state_dict()[name]) for name, value in found)
            for saved in (first, second)
        )
        loaded = copy.deepcopy(first)
        try:
            load_pretrained(loaded, folder)
        except (ValueError, FileNotFoundError):
            assert died
        else:
            is_new = torch.equal(loaded.layers[0].weight, second.layers[0].weight)
            expected = second if is_new else first
            assert_same(loaded.state_dict(), expected.state_dict(), bitwise=True)
            assert (folder / "config.json").read_text() == expected.config.text
            assert died or is_new
        if not died:
            break
        moments += 1
        save_pretrained(second, folder, max_shard_size=700)  # another number of files
        load_pretrained(loaded, folder)
        assert_same(loaded.state_dict(), second.state_dict(), bitwise=True)
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert moments >= 4


def test_wrong_arguments_are_refused(folder):
    layer = nn.Linear(2, 2)
    for size in ("", "5", "5XB", 0, -1, True, "0GB", None):
        with pytest.raises(ValueError, match="max_shard_size"):
            save_pretrained(layer, folder, max_shard_size=size)
    with pytest.raises(TypeError, match="floating-point"):
        save_pretrained(layer, folder, dtype=torch.int8)
    with pytest.raises(TypeError, match="rename must be"):
        load_pretrained(layer, folder, rename="x")
    with pytest.raises(ValueError, match=r"meta device.*'weight'"):
        save_pretrained(nn.Linear(2, 2, device="meta"), folder)
    assert not os.path.exists(folder)


def spoil(model):
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()


@on_ranks(2)
@spread(
    case=["transformer_tied", "mixed_dtype", "frozen_beside", "tied_inside"],
    how=["fully_shard", "plain"],
)
def test_a_model_on_the_meta_device_gets_memory_and_values(case, how, folder):
    case = CASES[case]
    plain = case.build()
    save_pretrained(shard_blocks(copy.deepcopy(plain)), folder)
    dist.barrier()
    with torch.device("meta"):
        model = case.build()
    for param, of_plain in zip(model.parameters(), plain.parameters(), strict=True):
        param.requires_grad_(of_plain.requires_grad)
    if how == "fully_shard":
        shard_blocks(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    with torch.inference_mode():  # as in an evaluation; what is loaded trains below
        load_pretrained(model, folder)
    assert_same(full_state(model), full_state(plain), bitwise=True)
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    if how == "plain":
        optimizers[0] = torch.optim.SGD(model.parameters(), lr=0.1)
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        case.loss(each(case.batch(0, 0))).backward()
        optimizer.step()
    assert_same(full_state(model), full_state(plain), case.dtype)  # also what is frozen


def test_a_model_that_was_made_under_inference_mode_is_filled_under_it(folder):
    plain = nn.Linear(4, 4)
    save_pretrained(plain, folder)
    with torch.inference_mode():
        model = nn.Linear(4, 4)
        load_pretrained(model, folder)
    assert_same(model.state_dict(), plain.state_dict(), bitwise=True)


@on_ranks(2)
def test_a_forward_after_loading_uses_the_new_values_of_a_unit_left_unsharded(folder):
    plain = seeded(nn.Linear(4, 4))
    model = meshard.fully_shard(copy.deepcopy(plain), reshard_after_forward=False)
    save_pretrained(model, folder)
    dist.barrier()
    spoil(model)
    with torch.no_grad():
        assert not model(torch.ones(1, 4)).any()
    load_pretrained(model, folder)
    assert_same(model(torch.ones(1, 4)), plain(torch.ones(1, 4)))


@on_ranks(2)
def test_adapters_with_values_beside_a_base_on_the_meta_device_keep_them(folder):
    plain = CASES["frozen_beside"].build()
    save_pretrained(plain, f"{folder}/{dist.get_rank()}")
    model = copy.deepcopy(plain)
    adapters = {name for name, param in model.named_parameters() if param.requires_grad}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and not param.requires_grad:
                module._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=False)
    shard_blocks(model)

    def only_the_base(name):
        return None if name in adapters else name

    path = f"{folder}/{dist.get_rank()}"
    report = load_pretrained(model, path, strict=False, rename=only_the_base)
    assert set(report.missing) == adapters and not report.unexpected
    assert_same(full_state(model), full_state(plain), bitwise=True)


def test_a_model_with_adapters_is_not_saved_as_one_that_from_pretrained_reads(folder):
    wrapped = nn.ModuleDict({"base_layer": nn.Linear(4, 4), "lora_A": nn.Linear(4, 2)})
    with pytest.raises(ValueError, match=r"got a Sequential with adapters of PEFT.*Merge adapters"):
        save_pretrained(nn.Sequential(wrapped), folder)
    assert not os.path.exists(folder) or not os.listdir(folder)


def linear_file(folder, **changes):
    os.makedirs(folder, exist_ok=True)
    plain = seeded(nn.Linear(4, 6))
    path = f"{folder}/file.safetensors"
    write_plain(plain, path, **changes)
    return plain, path


def check_unchanged_after(error, match, model, path, **kwargs):
    before = full_state(model)
    with pytest.raises(error, match=match):
        load_pretrained(model, path, **kwargs)
    assert_same(full_state(model), before, bitwise=True)


def test_missing_and_unexpected_names_are_refused_or_reported(folder):
    plain, path = linear_file(folder, bias=None, extra=torch.ones(2))
    model = nn.Linear(4, 6)
    check_unchanged_after(ValueError, "missing 'bias'; unexpected 'extra'", model, path)
    with pytest.warns(UserWarning, match=r"left 'bias' as before, and did not read 'extra'\. If"):
        report = load_pretrained(model, path, strict=False)
    assert report == (["weight"], ["bias"], ["extra"])
    assert torch.equal(model.weight, plain.weight)
    model = nn.Linear(4, 6, device="meta")  # whose bias would have no values
    with pytest.raises(ValueError, match=r"'bias' are on the meta device.*materialize"):
        load_pretrained(model, path, strict=False)
    assert model.weight.is_meta


def test_names_are_mapped_by_a_function_or_by_patterns(folder):
    plain, path = linear_file(folder)
    for rename in (lambda name: f"0.{name}", {"^": "0."}, {"nothing": "x", r"(\w+)$": r"0.\1"}):
        model = nn.Sequential(nn.Linear(4, 6))
        report = load_pretrained(model, path, rename=rename)
        assert report.loaded == ["0.weight", "0.bias"]
        assert_same(model[0].state_dict(), plain.state_dict(), bitwise=True)
    check_unchanged_after(ValueError, "one name, 'x'", plain, path, rename=lambda name: "x")
    check_unchanged_after(TypeError, "return a name, or None", plain, path, rename=lambda name: 1)


def test_a_tied_parameter_is_loaded_from_any_of_its_names(tmp_path):
    plain, model = (CASES["transformer_tied"].build() for _ in range(2))
    path = tmp_path / "file.safetensors"
    write_plain(plain, path, **{"embedding.weight": None, "head.weight": plain.head.weight})
    spoil(model)
    report = load_pretrained(model, path)
    assert {"embedding.weight", "head.weight"} <= set(report.loaded)
    assert_same(model.state_dict(), plain.state_dict(), bitwise=True)
    assert model.head.weight is model.embedding.weight


def test_floating_point_dtypes_are_cast_and_other_changes_refused(folder):
    _, path = linear_file(folder, bias=torch.arange(6.0).bfloat16())
    model = nn.Linear(4, 6)
    load_pretrained(model, path)
    assert model.bias.dtype == torch.float32 and model.bias.tolist() == list(range(6))
    for bias, text in (
        (torch.arange(6), r"'bias' is torch.float32.*torch.int64"),
        (torch.ones(6).to(torch.float8_e4m3fn), "'bias' is torch.float32.*torch.float8_e4m3fn"),
        (torch.ones(7), r"'bias' has shape \(6,\).*\(7,\)"),
    ):
        _, path = linear_file(folder, bias=bias)
        check_unchanged_after(ValueError, text, model, path)


@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_values_of_eight_bits_are_saved_exported_and_loaded_in_their_dtype(dtype, tmp_path):
    """As of weights in a microscaling format (MX), or in the float8 of AMD's GPUs."""
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    for each, scales in ((model, [0.5, 4.0]), (other, [1.0, 1.0])):
        each.register_buffer("scales", torch.tensor(scales).to(getattr(torch, dtype)))
    save_pretrained(model, tmp_path / "saved")
    Checkpointer(tmp_path / "run").save(1, model)
    assert command.main(["export", str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    for name in ("saved", "exported"):
        loaded = copy.deepcopy(other)
        load_pretrained(loaded, tmp_path / name)
        assert loaded.scales.dtype == model.scales.dtype
        assert loaded.scales.float().tolist() == [0.5, 4.0]


INDEX = "model.safetensors.index.json"
NUMBERED = "model-0000{}-of-00002.safetensors"
# What lies in a folder: "weights" for a file of a layer, "half" for one that is cut off, or a text.
UNREADABLE = {
    "is a pickle": {"pytorch_model.bin": ""},
    r"weights\.pt is a pickle": {"weights.pt": ""},
    "no whole safetensors file": {"model.safetensors": "half"},
    "pointer of Git LFS": {"model.safetensors": "version https://git-lfs.github.com/spec/v1\n"},
    "2 safetensors files": {"a.safetensors": "weights", "b.safetensors": "weights"},
    "1 safetensors files": {NUMBERED.format(1): "weights"},
    "no safetensors files": {},
    "not a file beside it": {INDEX: '{"weight_map": {"weight": "../model.safetensors"}}'},
    "is no index": {INDEX: "{}"},
    "there is no file .*model-00001": {
        INDEX: json.dumps({"weight_map": {"weight": NUMBERED.format(1)}})
    },
    "mixture of several saves": {
        INDEX: json.dumps({"weight_map": {key: NUMBERED.format(1) for key in ("weight", "bias")}}),
        NUMBERED.format(1): "bias is missing",
    },
}


@pytest.mark.parametrize("reason", [*UNREADABLE, "no file or folder"])
def test_what_cannot_be_read_is_refused_with_the_reason(reason, tmp_path):
    model = nn.Linear(4, 6)
    for name, text in UNREADABLE.get(reason, {}).items():
        path = tmp_path / name
        path.write_text(text)
        if text in ("weights", "half", "bias is missing"):
            write_plain(model, path, **({"bias": None} if text == "bias is missing" else {}))
        if text == "half":
            path.write_bytes(path.read_bytes()[:-4])
    own_path = {r"weights\.pt is a pickle": "weights.pt", "no file or folder": "none"}
    path = tmp_path / own_path.get(reason, "")
    check_unchanged_after((ValueError, FileNotFoundError), reason, model, path)


@on_ranks(2)
def test_what_one_rank_cannot_read_is_raised_on_all(folder):
    rank, plain = dist.get_rank(), seeded(nn.Linear(4, 6))
    model = meshard.fully_shard(copy.deepcopy(plain))
    save_pretrained(model, f"{folder}/of_both")
    own = nn.Linear(4, 6, dtype=torch.bfloat16 if rank else torch.float32)
    save_pretrained(own, f"{folder}/{rank}")
    dist.barrier()
    path = f"{folder}/none" if rank else f"{folder}/of_both"
    with pytest.raises(FileNotFoundError if rank else RuntimeError, match=r"on rank 1"):
        load_pretrained(model, path)
    with pytest.raises(ValueError, match="see different files"):
        load_pretrained(model, f"{folder}/{rank}")
    assert_same(full_state(model), full_state(plain), bitwise=True)

    def read(self, opened, box):
        if rank == 1:
            raise OSError("input/output error")
        return opened.get_slice(self.name)[box.slices]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights_files.StoredTensor, "read", read)
        with pytest.raises(RuntimeError, match=r"filled in part|failed on rank 1"):
            load_pretrained(model, f"{folder}/of_both")


def rotary():
    """Return a layer beside frequencies that are computed and in no file."""
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("frequencies", 10.0 ** -torch.arange(2.0), persistent=False)
    return model


@on_ranks(2)
def test_buffers_that_no_file_has_are_named_and_kept_by_meta_parameters(folder):
    plain = rotary()
    save_pretrained(meshard.fully_shard(copy.deepcopy(plain)), folder)
    dist.barrier()
    with torch.device("meta"):
        lost = rotary()
    meshard.fully_shard(lost)
    with pytest.raises(ValueError, match=r"'frequencies'.*meta_parameters\(\).*materialize"):
        load_pretrained(lost, folder)
    assert all(param.is_meta for param in lost.parameters())
    with meta_parameters():
        model = rotary()
    assert all(param.is_meta for param in model.parameters())
    meshard.fully_shard(model)
    load_pretrained(model, folder)
    assert torch.equal(model.frequencies, plain.frequencies)
    assert_same(full_state(model), full_state(plain), bitwise=True)


def test_a_tie_that_is_made_on_the_meta_device_stays_one_parameter():
    with meta_parameters():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        weight = nn.Parameter(torch.ones(2, 2))
        for layer in (other := [nn.Linear(2, 2), nn.Linear(2, 2)]):
            layer.weight = weight
    for one, two in (model, other):
        assert two.weight is one.weight and one.weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_without_the_wheels_the_install_command_is_named(monkeypatch, folder):
    monkeypatch.setattr(weights_files, "safe_open", None)
    monkeypatch.setattr(progress, "tqdm", None)
    model = nn.Linear(4, 6)
    save_pretrained(model, folder)
    command = re.escape('pip install "meshard[checkpoint]"')
    with pytest.raises(ImportError, match=command):
        load_pretrained(model, folder)
    with pytest.raises(ImportError, match=command):
        save_pretrained(model, folder, progress=True)


@on_ranks(2)
def test_progress_is_shown_on_the_first_rank_only(folder):
    model, _ = lay_out("sharded")
    for wanted in (True, None):
        written = io.StringIO()
        with contextlib.redirect_stderr(written):
            save_pretrained(model, folder, progress=wanted)
            load_pretrained(model, folder, progress=wanted)
        is_shown = bool(wanted) and dist.get_rank() == 0
        assert ("saving: 100%" in written.getvalue()) is is_shown
        assert ("loading: 100%" in written.getvalue()) is is_shown


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
LLAMA = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
BERT = {**SIZES, "num_attention_heads": 2, "max_position_embeddings": 9}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
FAMILIES = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "tied llama": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 9}),
    "bert": ("BertForMaskedLM", BERT),
    "t5": ("T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
}


@on_ranks(2)
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "t5"))
def test_transformers_reads_what_is_saved_and_its_folder_fills_a_meta_model(family, folder):
    import transformers

    name, options = FAMILIES[family]
    cls = getattr(transformers, name)
    config = cls.config_class(vocab_size=37, **options)
    torch.manual_seed(3)
    plain = cls(copy.deepcopy(config)).eval()
    model = copy.deepcopy(plain)
    meshard.fully_shard_units(model)
    ours = f"{folder}/ours"
    save_pretrained(model, ours, max_shard_size="8KB")
    dist.barrier()
    theirs, info = cls.from_pretrained(ours, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert_same(theirs.state_dict(), plain.state_dict(), bitwise=True)
    assert theirs.config.architectures == [cls.__name__]
    if plain.can_generate():
        assert Path(ours, "generation_config.json").exists()

    own = f"{folder}/theirs"
    plain.save_pretrained(own)  # by transformers itself, which writes on rank 0
    dist.barrier()
    with torch.device("meta"):
        filled = cls(copy.deepcopy(config))
    meshard.fully_shard_units(filled)
    load_pretrained(filled, own)
    expected = cls.from_pretrained(own)
    assert_same(full_state(filled), full_state(expected), bitwise=True)
    buffers, of_theirs = dict(filled.named_buffers()), dict(expected.named_buffers())
    assert buffers.keys() == of_theirs.keys()
    for name, buffer in buffers.items():
        assert torch.equal(buffer, of_theirs[name]), name
    tokens = torch.arange(8).view(1, 8)
    given = {"input_ids": tokens} | ({"labels": tokens} if family == "t5" else {})
    filled.eval(), expected.eval()
    with torch.no_grad():
        assert torch.equal(filled(**given).logits, expected(**given).logits)


def compiled(module):
    return torch.compile(module, backend="eager")


def with_compiled_layers(model):
    """Compile the inner model, and a layer of it, into modules whose names get a part more."""
    model.model.layers[0] = compiled(model.model.layers[0])
    model.model = compiled(model.model)
    return model


WRAPPERS = {
    "compile": compiled,
    "compile of layers": with_compiled_layers,
    "an average": AveragedModel,
    "an average of compile": lambda model: AveragedModel(compiled(model)),
}


@on_ranks(2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_of_torch_are_in_no_name_and_the_config_is_that_of_the_inner_model(
    wrapper, folder
):
    import transformers

    config = transformers.LlamaConfig(vocab_size=37, **LLAMA)
    torch.manual_seed(3)
    plain = transformers.LlamaForCausalLM(copy.deepcopy(config))
    wrap = WRAPPERS[wrapper]
    model = copy.deepcopy(plain)
    meshard.fully_shard_units(model)
    save_pretrained(wrap(model), folder)
    dist.barrier()
    theirs, info = type(plain).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_same(theirs.state_dict(), plain.state_dict(), bitwise=True)
    with torch.device("meta"):
        empty = type(plain)(copy.deepcopy(config))
    meshard.fully_shard_units(empty)
    filled = wrap(empty)
    assert load_pretrained(filled, folder) == (list(plain.state_dict()), [], [])
    assert_same(dict(stream_unsharded(filled)), plain.state_dict(), bitwise=True)
    (frequencies,) = [
        b for name, b in filled.named_buffers() if name.endswith("rotary_emb.inv_freq")
    ]
    assert torch.equal(frequencies, plain.model.rotary_emb.inv_freq)
