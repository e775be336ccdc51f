"""Manifests and metadata that say what is not so, with a right checksum: refused in clear words."""

import contextlib
import copy
import errno
import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
import pickle
import re
import resource
import shutil
import traceback
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import meshard
from meshard.checkpoint import Checkpointer, CheckpointError
from meshard.checkpoint.__main__ import main as command
from tests.checkpoint.runs import assert_same_values, net, values_of
from tests.support.models import seeded

FILES = Path(__file__).parent / "files"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # by no_dist


# --- manifests that are written anew ---------------------------------------------------------


def canonical(value):
    return json.dumps(value, separators=(",", ":")).encode()


def sealed(content):
    """Return the text of a manifest with this content, which may be JSON text itself."""
    text = content if isinstance(content, bytes) else canonical(content)
    checksum = canonical("sha256:" + hashlib.sha256(text).hexdigest())
    return b'{"checksum":' + checksum + b',"content":' + text + b"}"


def content_of(folder):
    return json.loads((folder / "manifest.json").read_text())["content"]


def paths_in(value, at=()):
    """Yield the keys that lead to each value in JSON."""
    yield at
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from paths_in(value[key], (*at, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


DELETED = object()


def changed(content, path, new):
    """Return content with another value in a place."""
    if not path:
        return {} if new is DELETED else new
    content = copy.deepcopy(content)
    inner = at(content, path[:-1])
    if new is DELETED:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return content


class Linear(nn.Linear):
    """Of uneven shards on two ranks."""

    def __init__(self, seed=0):
        super().__init__(3, 3)
        seeded(self, seed)


def with_state(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def save_linear(folder):
    model = meshard.fully_shard(Linear())
    beside = {"ema": [torch.arange(3.0)], "tokens": 3, "name": (1, "x")}
    Checkpointer(folder).save(1, model, with_state(model), beside=beside)


def load_linear(folder):
    model, ema = Linear(3), torch.zeros(3)
    optimizer = with_state(model)

    def values():
        states = [optimizer.state[param].items() for param in model.parameters()]
        found = {f"{number}.{key}": each for number, own in enumerate(states) for key, each in own}
        tensors = {key: each for key, each in found.items() if isinstance(each, torch.Tensor)}
        return {**values_of(model), **tensors, "ema": ema.clone()}

    load = Checkpointer(folder).load
    return loaded(values, lambda: load(model, optimizer, beside={"ema": [ema]}))


def load_net(folder):
    model = net("plain", seed=3)
    return loaded(lambda: values_of(model), lambda: Checkpointer(folder).load(model))


def loaded(values, load):
    """Load, and return the values. An error has changed none, unless its text says so."""
    before = {name: each.clone() for name, each in values().items()}
    try:
        load()
    except CheckpointError as error:
        if "loaded" not in str(error).replace("nothing was loaded", ""):
            assert_same_values(values(), before)
        raise
    return values()


# By name: the folder of the step, and how it is loaded.
LOADS = {"new": ("step-1", load_linear), "format 1": ("step-2.1", load_net)}


@pytest.fixture(scope="module")
def saved(run_ranks, tmp_path_factory):
    """Return two runs of one step each, which tests write other manifests into."""
    folder = tmp_path_factory.mktemp("manifests")
    run_ranks(save_linear, 2, folder / "new")
    shutil.copytree(FILES / "format-1" / "step-2.1", folder / "format 1" / "step-2.1")
    return folder


@contextlib.contextmanager
def manifest_as(saved, name, text):
    """Write another manifest for a while; yield the folder of the run.

    Meanwhile the process gets no more than 4 GiB: what a manifest says must not fill the memory.
    """
    file = saved / name / LOADS[name][0] / "manifest.json"
    before, limits = file.read_bytes(), resource.getrlimit(resource.RLIMIT_AS)
    file.write_bytes(text)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**32, limits[1]))
    try:
        yield saved / name
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        file.write_bytes(before)


# What a user cannot understand without reading our code.
RAW = re.compile(
    r"\b(Attribute|Key|Type|Value|Index|Memory|Recursion|Overflow|Assertion|Runtime)Error\b"
    r"|has no attribute|not subscriptable|unhashable|not iterable"
)


def assert_clear(text):
    assert "MemoryError" not in text, text
    is_named = "manifest.json" in text or "did not take its state" in text
    assert is_named or not RAW.search(text), text


def outcome(folder, load):
    """Look at a checkpoint by all ways; return what was loaded, or None if it was refused."""
    checkpointer = Checkpointer(folder)
    for call in (checkpointer.manifest, checkpointer.verify):
        try:
            call()
        except CheckpointError as error:
            assert_clear(str(error))
    for name in ("list", "show", "verify"):
        assert command([name, str(folder)]) in (0, 1)
    try:
        return load(folder)
    except CheckpointError as error:
        assert_clear(str(error))
        return None


def check_mutation(saved, name, content, paths):
    """Check that mutated content loads the same values, or is refused."""
    load = LOADS[name][1]
    expected = load(saved / name)
    with manifest_as(saved, name, sealed(content)) as folder:
        found = outcome(folder, load)
    # Plain values may be others: that is another checkpoint, and a right one.
    if found is not None and not any(path[:1] == ("parts",) for path in paths):
        assert_same_values(found, expected)


VALUES = [
    None, True, -1, 0, 1, 2, 7, 2**40, 2**62, 1.5, "", "x", "float64", "../x", [], [[]], [0], {},
    {"$": "tensor"}, {"$": "tensor", "name": "x"}, {"$": "data", "dtype": "float64"}, {"$": 5},
]  # fmt: skip


@st.composite
def mutations(draw, content):
    """Return content with one to three changes, and where they were made."""
    made = []
    for _ in range(draw(st.integers(1, 3))):
        paths = list(paths_in(content))
        path, other = draw(st.sampled_from(paths)), draw(st.sampled_from(paths))
        new = draw(st.one_of(st.just(DELETED), st.sampled_from(VALUES)))
        if draw(st.integers(0, 3)) == 0:
            new = at(content, other)
            made.append(("parts",))  # what is exchanged may be right, and other values
        content = changed(content, path, new)
        made.append(path)
        if not isinstance(content, dict):
            break
    # Changes of several places may fit together.
    return content, made if len(made) == 1 else [*made, ("parts",)]


@pytest.mark.parametrize("name", LOADS)
@given(data=st.data())
def test_any_change_of_a_manifest_is_refused_in_clear_words_or_loads_the_same(saved, name, data):
    content, paths = data.draw(mutations(content_of(saved / name / LOADS[name][0])))
    check_mutation(saved, name, content, paths)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LOADS)
def test_each_value_of_a_manifest_may_be_missing_or_wrong(saved, name):
    content = content_of(saved / name / LOADS[name][0])
    for number, path in enumerate(paths_in(content)):
        for new in [DELETED, *VALUES][number % 6 :: 6]:  # each place, and each value somewhere
            try:
                check_mutation(saved, name, changed(content, path, new), [path])
            except BaseException as error:
                error.add_note(f"{path} became {'nothing' if new is DELETED else new!r}")
                raise


def without_chunks(content, tensor):
    """Return content where a tensor has no chunks: of format 2, all tensors of its kind."""
    entry = content["tensors"][tensor]
    if isinstance(entry, dict):
        return {**content, "tensors": {**content["tensors"], tensor: {**entry, "chunks": []}}}
    kinds = [each[:3] if n == entry else each for n, each in enumerate(content["kinds"])]
    return {**content, "kinds": kinds}


@pytest.mark.parametrize("name", LOADS)
def test_a_tensor_without_chunks_is_refused_and_named(saved, name):
    content, load = content_of(saved / name / LOADS[name][0]), LOADS[name][1]
    kinds = set()
    for tensor, entry in content["tensors"].items():
        if not isinstance(entry, dict):
            if entry in kinds:  # the first of its kind is named
                continue
            kinds.add(entry)
        with (
            manifest_as(saved, name, sealed(without_chunks(content, tensor))) as folder,
            pytest.raises(CheckpointError, match=rf"(?s)manifest\.json.*{re.escape(tensor)}"),
        ):
            load(folder)


def test_a_chunk_of_format_1_that_points_outside_of_its_blob_is_refused(saved):
    """It would read its neighbour: the elements of another tensor, or of another rank."""
    content = content_of(saved / "format 1" / "step-2.1")
    chunks = [chunk for each in content["tensors"].values() for chunk in each["chunks"]]
    for position, neighbour in itertools.pairwise(range(len(chunks))):
        own = copy.deepcopy(content)
        rows = [chunk[2] for each in own["tensors"].values() for chunk in each["chunks"]]
        row, following = rows[position], rows[neighbour]
        if row[0] != following[0]:
            continue
        # A row: file, begin, size, checksum, then where in these bytes the elements are. The
        # checksum is over the elements, of which there are none, and the bytes around them.
        row[4] = following[1] + following[4] - row[1]
        data = (saved / "format 1" / "step-2.1" / content["files"][row[0]]).read_bytes()
        row[3] = zlib.crc32(data[row[1] : row[1] + row[2]])
        with (
            manifest_as(saved, "format 1", sealed(own)) as folder,
            pytest.raises(CheckpointError, match=r"manifest\.json"),
        ):
            load_net(folder)


@pytest.mark.parametrize("depth", [500, 5_000, 200_000])
@pytest.mark.parametrize("name", LOADS)
def test_values_of_any_depth_are_refused_or_loaded(saved, name, depth):
    content = content_of(saved / name / LOADS[name][0])
    content["parts"]["deep"] = {"kind": "value", "tree": "here"}
    nested = b"[" * depth + b"]" * depth
    text = canonical(content).replace(b'"here"', nested)
    with manifest_as(saved, name, sealed(text)) as folder:
        outcome(folder, LOADS[name][1])


@pytest.mark.parametrize("text", [
    b"", b"null", b"[]", b"5", b'"x"', b"{}", b"\xff\xfe", b"[" * 100_000, b"1" * 5000,
    b'{"checksum":null,"content":null}', sealed([]), sealed(None), sealed("x"), sealed(1e999),
    sealed({"format": "meshard.checkpoint"}),
    sealed({"format": "meshard.checkpoint", "format_version": "x"}),
    sealed({"format": "meshard.checkpoint", "format_version": 99}),
], ids=lambda text: repr(text[-20:]))  # fmt: skip
def test_what_is_no_manifest_is_refused_by_the_name_of_the_file(saved, text):
    with manifest_as(saved, "new", text) as folder:
        assert outcome(folder, load_linear) is None
        with pytest.raises(CheckpointError, match=r"manifest\.json|format 99 of a newer meshard"):
            load_linear(folder)


MARKERS = [b"", b"[]", b"{", b"null", b"5", b"\xff", b'{"number":[]}', b"[" * 100_000, b"{}"]


@pytest.mark.parametrize("marker", MARKERS)
def test_a_marker_that_is_not_ours_hides_no_checkpoint(tmp_path, marker):
    """The number of the commit is in it. Format 1 has an empty one."""
    Checkpointer(tmp_path).save(1, Linear(), tokens=3)
    (tmp_path / "step-1" / ".meshard").write_bytes(marker)
    assert Checkpointer(tmp_path).load(Linear(1), step=1).extra == {"tokens": 3}
    Checkpointer(tmp_path).save(2, Linear(), tokens=4)
    checkpointer = Checkpointer(tmp_path)
    assert (checkpointer.steps(), checkpointer.latest_step()) == ([1, 2], 2)


# --- what is in the place of a file ----------------------------------------------------------

FORK = multiprocessing.get_context("forkserver")
SECONDS = 60


def answer(connection, function, arguments):
    try:
        function(*arguments)
        connection.send("")
    except BaseException:
        connection.send(traceback.format_exc())


def in_a_new_process(function, *arguments):
    """Call a function of this module; it may hang, crash, or spoil the process."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=answer, args=(theirs, function, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(SECONDS), f"it hangs: {function.__name__}{arguments}"
        error = ours.recv()
    except EOFError:
        process.join()
        error = f"the process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
    assert not error, error


def refuse_to_load(folder, name):
    with pytest.raises(CheckpointError, match=re.escape(name)):
        Checkpointer(folder).load(Linear(3))
    damages = Checkpointer(folder).verify()
    assert [each.file for each in damages] == [name]
    assert command(["verify", str(folder)]) == 1


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_fifo_or_a_folder_in_the_place_of_a_data_file_is_refused(tmp_path, make):
    Checkpointer(tmp_path).save(1, Linear())
    data = tmp_path / "step-1" / "rank-00000.safetensors"
    data.unlink()
    make(data)
    in_a_new_process(refuse_to_load, tmp_path, data.name)


@pytest.mark.extras  # torch's checkpoints need NumPy
def test_a_fifo_in_the_place_of_a_file_of_torch_is_refused(tmp_path):
    model = Linear()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "__0_0.distcp").unlink()
    os.mkfifo(tmp_path / "__0_0.distcp")
    in_a_new_process(refuse_files_of_torch, tmp_path)


def refuse_files_of_torch(folder):
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        Checkpointer(folder).load(Linear(3))


def answering_enoent(monkeypatch, *, is_renamed):
    """Let renames of manifests fail as on a network folder; return what was asked."""
    asked = []
    for name in ("rename", "replace"):
        rename = getattr(os, name)

        def fail(source, target, rename=rename, **kwargs):
            if os.path.basename(os.fspath(target)) != "manifest.json":
                return rename(source, target, **kwargs)
            asked.append(target)
            if is_renamed:
                rename(source, target, **kwargs)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))

        monkeypatch.setattr(os, name, fail)
    return asked


def test_a_rename_that_has_happened_and_answers_enoent_is_a_commit(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path)
    asked = answering_enoent(monkeypatch, is_renamed=True)
    checkpointer.save(1, Linear())
    assert asked and checkpointer.steps() == [1]
    assert checkpointer.verify() == []
    values = values_of(Linear())
    model = Linear(3)
    checkpointer.load(model)
    assert_same_values(values_of(model), values)


def test_a_rename_that_has_not_happened_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path)
    with monkeypatch.context() as patched:
        asked = answering_enoent(patched, is_renamed=False)
        with pytest.raises(CheckpointError, match="step 1 was not saved"):
            checkpointer.save(1, Linear())
    assert asked and checkpointer.steps() == []
    checkpointer.save(1, Linear())
    assert checkpointer.steps() == [1]


# --- metadata of torch -----------------------------------------------------------------------


def save_by_torch(folder, rows=4):
    model = nn.Sequential(nn.Linear(3, rows), nn.Linear(3, rows))
    seeded(model)
    dcp.save({"model": model.state_dict(), "note": {"a": [1, "x"]}}, checkpoint_id=folder,
             no_dist=True)  # fmt: skip
    return model


def rewrite(folder, change):
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def clear_chunks(metadata):
    metadata.state_dict_metadata["model.0.weight"].chunks.clear()


def add_a_row(metadata):
    entry = metadata.state_dict_metadata["model.0.weight"]
    entry.size = torch.Size([5, 3])
    entry.chunks[0].sizes = torch.Size([5, 3])


def move_chunk(metadata):
    entry = metadata.state_dict_metadata["model.0.weight"]
    (key,) = (each for each in metadata.storage_data if each.fqn == "model.0.weight")
    info = metadata.storage_data.pop(key)
    entry.chunks[0].offsets = torch.Size([1, 0])
    metadata.storage_data[type(key)(key.fqn, torch.Size([1, 0]), key.index)] = info


def forget_place(metadata):
    for key in [each for each in metadata.storage_data if each.fqn == "model.0.weight"]:
        del metadata.storage_data[key]


def point_behind(metadata):
    for key, info in metadata.storage_data.items():
        if key.fqn == "model.0.weight":
            info.offset = 2**40


def other_dtype(metadata):
    properties = metadata.state_dict_metadata["model.0.weight"].properties
    properties.dtype = torch.float64


CHANGES = [clear_chunks, add_a_row, move_chunk, forget_place, point_behind, other_dtype]


@pytest.mark.extras  # torch's checkpoints need NumPy
@pytest.mark.parametrize("change", CHANGES)
def test_metadata_of_torch_that_does_not_cover_a_tensor_is_refused(tmp_path, change):
    save_by_torch(tmp_path)
    rewrite(tmp_path, change)
    model = nn.Sequential(nn.Linear(3, 5 if change is add_a_row else 4), nn.Linear(3, 4))
    if change is add_a_row:
        model[0].bias = nn.Parameter(torch.zeros(4))
    if change is other_dtype:
        model[0].weight = nn.Parameter(model[0].weight.double())
    before = values_of(model)
    with pytest.raises(CheckpointError, match=r"\.metadata|\.distcp"):
        Checkpointer(tmp_path).load(model)
    assert_same_values(values_of(model), before)


def pushed(module, name):
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def patching(target):
    """Return a pickle that sets attributes of what ``target`` pushes."""
    state = {"patched": 1, "__setstate__": 2, "__hash__": 3, "__init__": 4}
    body = pickle.dumps((None, state), 2)[2:-1]
    return b"\x80\x02" + target + body + b"b."


METADATA = "torch.distributed.checkpoint.metadata"
GLOBALS = [
    ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"), ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"), ("collections", "defaultdict"), ("torch", "Size"),
    ("torch.serialization", "_get_layout"), ("builtins", "getattr"), ("builtins", "set"),
    (METADATA, "Metadata"), (METADATA, "TensorStorageMetadata"), (METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "float32"),
]  # fmt: skip


def survive(folder, hostile, expected):
    """Read a hostile file, then a right one."""
    path = folder / ".metadata"
    right = path.read_bytes()
    path.write_bytes(hostile)
    known = [pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.Path,
             torch.Size, torch.serialization._get_layout, torch.float32]  # fmt: skip
    before = [dict(vars(each)) if hasattr(each, "__dict__") else {} for each in known]
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        Checkpointer(folder).load(nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4)))
    assert [dict(vars(each)) if hasattr(each, "__dict__") else {} for each in known] == before
    path.write_bytes(right)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4))
    loaded = Checkpointer(folder).load(model)
    assert loaded.extra == {"note": {"a": [1, "x"]}}
    assert_same_values(values_of(model), expected)


@pytest.mark.extras  # torch's checkpoints need NumPy
@pytest.mark.parametrize(("module", "name"), GLOBALS)
def test_a_hostile_pickle_patches_nothing(tmp_path, module, name):
    expected = values_of(save_by_torch(tmp_path))
    in_a_new_process(survive, tmp_path, patching(pushed(module, name)), expected)


DEEP = 300_000
HOSTILE = {
    "lists": b"\x80\x02" + b"]" * DEEP + b"a" * (DEEP - 1) + b".",
    "records": b"\x80\x02"
    + (pushed(METADATA, "Metadata") + b")\x81}U\x01a") * DEEP
    + b"N"
    + b"sb" * DEEP
    + b".",
    "no end": b"\x80\x02" + b"]" * 10,
    "an unknown protocol": b"\x80\x63].",
    "a reference to nothing": b"\x80\x02h\x05.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"\x80\x02K\x01Q.",
    "a call of a type": b"\x80\x02" + pushed("torch", "Size") + b"K\x05\x85R.",
    "nothing": b"",
    "text": b"hello",
    "a number": pickle.dumps(5),
    "a dict": pickle.dumps({"state_dict_metadata": {}, "storage_data": {}}),
}  # fmt: skip


@pytest.mark.extras  # torch's checkpoints need NumPy
@pytest.mark.parametrize("name", HOSTILE)
def test_a_pickle_that_is_no_metadata_is_refused_and_ends_nothing(tmp_path, name):
    expected = values_of(save_by_torch(tmp_path))
    in_a_new_process(survive, tmp_path, HOSTILE[name], expected)
