"""Weights in safetensors files: written by all ranks, read by each in part."""

import builtins
import contextlib
import copy
import io
import itertools
import json
import logging
import os
import re
import shutil
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

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


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
            patch.setattr(weights_files, "write_tensor", write)
        expected = OSError if dist.get_rank() == failing else RuntimeError
        with pytest.raises(expected, match=f"no space|failed on rank {failing}"):
            save_pretrained(model, folder, max_shard_size=size)
    dist.barrier()
    assert contents(folder) == before


class KilledError(BaseException):
    """A stand-in for the death of the process."""


@contextlib.contextmanager
def dying_at(moment):
    """Raise at the n-th act on the disk, and at every later one; yield the list of acts."""
    acts = []

    def watched(name, real):
        def act(*args, **kwargs):
            if name != "open" or "w" in "".join(map(str, [*args[1:], *kwargs.values()])):
                paths = args[: 1 + (name == "replace")]
                if name == "fsync":
                    paths = [os.readlink(f"/proc/self/fd/{args[0]}")]
                acts.append(" ".join([name, *(Path(path).name for path in paths)]))
                if len(acts) >= moment:
                    raise KilledError
            return real(*args, **kwargs)

        return act

    with pytest.MonkeyPatch.context() as patch:
        names = ["replace", "rename", "unlink", "rmdir", "mkdir", "fsync"]
        for owner, name in [*((os, name) for name in names), (builtins, "open"), (io, "open")]:
            patch.setattr(owner, name, watched(name, getattr(owner, name)))
        with contextlib.suppress(KilledError):
            yield acts


def files_of(folder, first):
    """Return the files that a reader takes which looks for ``first`` before the other one.

    transformers looks for the single file first, inference servers for the index.
    """
    names = [first, *{SINGLE, INDEX} - {first}]
    found = next(name for name in names if (folder / name).exists())
    if found == SINGLE:
        return {SINGLE}
    return {*json.loads((folder / INDEX).read_text())["weight_map"].values()}


def read_as(reader, folder, model):
    from safetensors.torch import load_file

    if reader == "load_pretrained":
        loaded = copy.deepcopy(model)
        spoil(loaded)
        load_pretrained(loaded, folder)
        return loaded.state_dict()
    if reader == "transformers":
        loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        return loaded.state_dict()
    found = [load_file(folder / name) for name in files_of(folder, reader)]
    pairs = {name: value for each in found for name, value in each.items()}
    return {name: pairs.pop(name) for name in (*model.state_dict(), *pairs) if name in pairs}


def check_kills(models, sizes, readers, tmp_path):
    """Save the second of two models over the first, and die at each act on the disk in turn."""
    old, new = models
    of_new = {reader: [] for reader in readers}
    for moment in itertools.count(1):
        folder = tmp_path / f"{moment}"
        save_pretrained(old, folder, max_shard_size=sizes[0])
        # What is left of other weights, or of a save that was killed.
        write_plain(nn.Linear(2, 2), folder / "model-00007-of-00009.safetensors")
        with dying_at(moment) as acts:
            save_pretrained(new, folder, max_shard_size=sizes[1])
        for reader, is_new in of_new.items():
            found = read_as(reader, folder, old)
            name = next(iter(found))
            is_new.append(torch.equal(found[name], new.state_dict()[name]))
            expected = (new if is_new[-1] else old).state_dict()
            assert_same(found, expected, bitwise=True, what=f"{reader} before {acts[-1]!r}")
        if len(acts) < moment:  # it has lived
            break
        if any(is_new[-1] for is_new in of_new.values()):
            assert '"new": 1' in (folder / "config.json").read_text()
        after = tmp_path / f"after {moment}"
        shutil.move(folder, after)
        save_pretrained(old, after, max_shard_size=sizes[1])
        assert {"config.json", *files_of(after, INDEX)} <= set(os.listdir(after))
        assert not set(os.listdir(after)) - {"config.json", INDEX, *files_of(after, SINGLE)}
    assert all(each == sorted(each) and not each[0] and each[-1] for each in of_new.values())
    assert {*files_of(folder, INDEX)} == {*files_of(folder, SINGLE)}
    assert not set(os.listdir(folder)) - {"config.json", INDEX, *files_of(folder, SINGLE)}
    return acts


SIZES_OF_PAIRS = {  # of files, of the old weights and of the new
    "one by one": ("5GB", "5GB"),
    "one by several": ("5GB", 300),
    "several by one": (300, "5GB"),
    "several by as many": (300, 300),
    "several by fewer": (300, 500),
}


@pytest.mark.parametrize("pair", SIZES_OF_PAIRS)
def test_a_kill_at_any_act_leaves_the_old_or_the_new_weights_to_every_reader(pair, tmp_path):
    models = [seeded(CASES["uneven"].build(), seed=seed) for seed in (1, 2)]
    models[0].config, models[1].config = Config(), Config()
    models[1].config.text = '{"new": 1}'
    readers = ["load_pretrained", SINGLE, INDEX]
    acts = check_kills(models, SIZES_OF_PAIRS[pair], readers, tmp_path)

    # What a loss of power must not undo is synced before what relies on it.
    commit = acts.index(
        next(act for act in acts if re.search(rf"replace .* ({SINGLE}|{INDEX})", act))
    )
    for act in acts[:commit]:
        if act.startswith("replace"):
            assert f"fsync {act.split()[1]}" in acts[: acts.index(act)]
    assert not any(act.startswith("unlink model") for act in acts[:commit])
    folder = acts[commit - 1]
    assert folder.startswith("fsync") and acts[commit + 1] == folder
    removals = [n for n, act in enumerate(acts) if act.startswith("unlink model")]
    if "several" in pair:
        assert acts[removals[0] + 1] == folder


@pytest.mark.parametrize("pair", mostly_slow(SIZES_OF_PAIRS, "several by as many"))
def test_transformers_reads_what_is_left_by_a_kill(pair, tmp_path):
    import transformers

    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        config = transformers.BertConfig(vocab_size=37, **BERT, new=seed - 1)
        models.append(transformers.BertModel(config))
    sizes = [size if size == "5GB" else 30 * size for size in SIZES_OF_PAIRS[pair]]
    check_kills(models, sizes, ["transformers"], tmp_path)


def test_wrong_arguments_are_refused(folder):
    layer = nn.Linear(2, 2)
    for size in ("", "5", "5XB", 0, -1, True, "0GB", None):
        with pytest.raises(ValueError, match="max_shard_size"):
            save_pretrained(layer, folder, max_shard_size=size)
    with pytest.raises(TypeError, match="floating-point"):
        save_pretrained(layer, folder, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"'weight', 'bias' are on the meta device"):
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
        (torch.ones(7), r"'bias' is .* of shape \(6,\).*\(7,\)"),
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


def test_a_cast_leaves_values_of_eight_bits_as_they_are(folder):
    """They would lose their scales."""
    model = nn.Linear(2, 2)
    model.register_buffer("small", torch.tensor([0.5, -448.0]).to(torch.float8_e4m3fn))
    save_pretrained(model, folder, dtype=torch.bfloat16)
    for found in (read_all(folder), dict(stream_unsharded(model, dtype=torch.bfloat16))):
        assert found["weight"].dtype == torch.bfloat16
        assert found["small"].dtype == torch.float8_e4m3fn
        assert found["small"].float().tolist() == [0.5, -448.0]


def test_a_name_that_safetensors_cannot_hold_is_refused(folder):
    model = nn.Linear(2, 2)
    save_pretrained(model, folder)
    before = contents(folder)
    model.register_buffer("__metadata__", torch.ones(2))
    with pytest.raises(ValueError, match="a tensor is called '__metadata__'"):
        save_pretrained(model, folder)
    assert contents(folder) == before


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [SINGLE, INDEX, "model-1.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_refused(name, tmp_path):
    if name.startswith("model-"):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"weight": name}}))
    os.mkfifo(tmp_path / name)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(FileNotFoundError, match=f"no regular file .*{name}"):
            load_pretrained(nn.Linear(2, 2), path)


BESIDE = {  # what lies beside the weights of a model, and is copied
    "tokenizer.json": "{}",
    "tokenizer.model": "\0",
    "merges.txt": "a b",
    "chat_template.jinja": "{{ x }}",
    "modeling_own.py": "",
    "LICENSE": "",
}
NOT_COPIED = [SINGLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json", "x.gguf", ".git"]


@on_ranks(2)
def test_extra_files_are_copied_and_those_of_weights_are_not(folder):
    original, saved = Path(folder, "original"), Path(folder, "saved")
    model, plain = lay_out("sharded")
    model.config = Config()
    if dist.get_rank() == 0:
        (original / "inside").mkdir(parents=True)
        for name, text in [*BESIDE.items(), *((name, "old") for name in NOT_COPIED)]:
            (original / name).write_text(text)
        (original / "config.json").write_text("of the original")
    dist.barrier()
    one, other = original / "tokenizer.json", str(original / "merges.txt")
    for given, expected in (
        (original, set(BESIDE)),
        ([str(one), original], set(BESIDE)),
        (other, {"merges.txt"}),
        ((one, other, original / SINGLE), {"tokenizer.json", "merges.txt"}),
        (None, set()),
    ):
        save_pretrained(model, saved, extra_files=given)
        dist.barrier()
        names = {*expected, "config.json", SINGLE}
        assert set(os.listdir(saved)) == names
        assert all((saved / name).read_text() == BESIDE[name] for name in expected)
        assert (saved / "config.json").read_text() == "{}"
        assert_same(read_all(saved), without_ties(plain), bitwise=True)
        dist.barrier()
        before = contents(saved)
        error = RuntimeError if dist.get_rank() else FileNotFoundError
        with pytest.raises(error, match=r"original/none|failed on rank 0"):
            save_pretrained(model, saved, extra_files=[original / "none"])
        dist.barrier()
        assert contents(saved) == before
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(saved)
        dist.barrier()


def test_a_folder_may_give_its_own_extra_files(folder):
    model = nn.Linear(2, 2)
    save_pretrained(model, folder)
    Path(folder, "tokenizer.json").write_text("{}")
    save_pretrained(model, folder, extra_files=folder)
    assert set(os.listdir(folder)) == {SINGLE, "tokenizer.json"}


@on_ranks(2)
def test_a_line_sums_up_what_was_saved_and_loaded_on_the_first_rank(folder):
    model, _ = lay_out("sharded")
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("meshard")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        save_pretrained(model, folder, max_shard_size=2000)
        load_pretrained(model, folder)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    lines = [record.getMessage() for record in records]
    assert len(lines) == (0 if dist.get_rank() else 2)
    num_files = len(list(Path(folder).glob("*.safetensors")))
    for line, verb in zip(lines, ("saved", "loaded"), strict=False):
        assert re.search(rf"^{verb} {folder}: .* s, [\d.]+ GB/s, files: {num_files}$", line), line


NUMBERED = "model-0000{}-of-00002.safetensors"
# What lies in a folder: "weights" for a file of a layer, "half" for one that is cut off, or a text.
UNREADABLE = {
    "0 safetensors files .* A pickle": {"pytorch_model.bin": ""},
    r"weights\.pt is no whole .* A pickle": {"weights.pt": ""},
    "no whole safetensors file": {"model.safetensors": "half"},
    "pointer of Git LFS": {"model.safetensors": "version https://git-lfs.github.com/spec/v1\n"},
    "2 safetensors files": {"a.safetensors": "weights", "b.safetensors": "weights"},
    "1 safetensors files": {NUMBERED.format(1): "weights"},
    "0 safetensors files": {},
    "not a file beside it": {INDEX: '{"weight_map": {"weight": "../model.safetensors"}}'},
    "is no index": {INDEX: "{}"},
    "no regular file .*model-00001": {
        INDEX: json.dumps({"weight_map": {"weight": NUMBERED.format(1)}})
    },
    "mixture of several saves": {
        INDEX: json.dumps({"weight_map": {key: NUMBERED.format(1) for key in ("weight", "bias")}}),
        NUMBERED.format(1): "bias is missing",
    },
}


@pytest.mark.parametrize("reason", [*UNREADABLE, "no regular file"])
def test_what_cannot_be_read_is_refused_with_the_reason(reason, tmp_path):
    model = nn.Linear(4, 6)
    for name, text in UNREADABLE.get(reason, {}).items():
        path = tmp_path / name
        path.write_text(text)
        if text in ("weights", "half", "bias is missing"):
            write_plain(model, path, **({"bias": None} if text == "bias is missing" else {}))
        if text == "half":
            path.write_bytes(path.read_bytes()[:-4])
    own_path = {r"weights\.pt is no whole .* A pickle": "weights.pt", "no regular file": "none"}
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
