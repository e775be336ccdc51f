"""What others write and read, values of any kind, and what a checkpoint costs."""

import collections
import copy
import enum
import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as of_torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

import meshard
from meshard.checkpoint import Checkpointer, CheckpointError
from meshard.checkpoint.__main__ import main as command
from tests.checkpoint.runs import assert_same_values, check_loads, net, trained, values_of
from tests.support.models import seeded
from tests.support.ranks import on_ranks

ROOT = Path(__file__).parents[2]
MiB = 2**20


# --- folders of torch that torchtitan and scripts write --------------------------------------

FLAT = of_torch.StateDictOptions(flatten_optimizer_state_dict=True)


class Stateful:
    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def flat(model, optimizer):
    return {
        "model": of_torch.get_model_state_dict(model),
        "optimizer": of_torch.get_optimizer_state_dict(model, optimizer, options=FLAT),
    }


def raw(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 8}


def titan(model, optimizer):
    """Names of the model beside other parts, as torchtitan has them."""
    states = flat(model, optimizer)
    return {
        **states.pop("model"),
        **states,
        "lr_scheduler": Stateful(last_epoch=2),
        "train_state": Stateful(step=torch.tensor(8, dtype=torch.int32)),
    }


STATES = {"flat": flat, "raw": raw, "titan": titan}


def save_states(folder, kind, layout):
    torch.manual_seed(dist.get_rank())
    model, optimizer = trained(layout, 2)
    dcp.save(STATES[kind](model, optimizer), checkpoint_id=folder)
    return values_of(model, optimizer)


def load_states(folder, kind, layout, expected):
    """Load, and train on; ``check_loads`` compares bit for bit."""
    extra = {"lr_scheduler": Stateful(), "train_state": Stateful()} if kind == "titan" else {}
    loaded = check_loads(Checkpointer(folder), layout, expected, **extra)
    assert (loaded.missing, loaded.unexpected, loaded.unreadable) == ([], [], [])
    if kind == "titan":
        assert extra["lr_scheduler"].state == {"last_epoch": 2}
        assert extra["train_state"].state == {"step": torch.tensor(8, dtype=torch.int32)}
    if kind == "raw":
        assert loaded.step == 8


@pytest.mark.extras  # torch's checkpoints need NumPy
@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 2), (2, 1), (1, 2)])
def test_flat_and_raw_states_of_optimizers_load_bit_for_bit(
    run_ranks, tmp_path, kind, saved_on, loaded_on
):
    layouts = {1: "plain", 2: "fully_shard"}
    expected = run_ranks(save_states, saved_on, tmp_path, kind, layouts[saved_on])[0]
    run_ranks(load_states, loaded_on, tmp_path, kind, layouts[loaded_on], expected)


def in_groups(seed, rates):
    model = seeded(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), seed)
    groups = [
        {"params": list(layer.parameters()), "lr": lr}
        for layer, lr in zip(model, rates, strict=True)
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.extras
@pytest.mark.parametrize("kind", ["flat", "raw"])
@on_ranks(1)
def test_groups_of_flat_and_raw_optimizers_keep_their_hyperparameters(tmp_path, kind):
    model, optimizer = in_groups(0, (0.1, 0.2))
    optimizer.param_groups[1]["lr"] = 0.3
    dcp.save(STATES[kind](model, optimizer), checkpoint_id=tmp_path)
    other, loaded = in_groups(1, (0.5, 0.6))
    Checkpointer(tmp_path).load(other, loaded)
    assert_same_values(values_of(other, loaded), values_of(model, optimizer))
    assert [group["lr"] for group in loaded.param_groups] == [0.1, 0.3]


@pytest.mark.extras
@pytest.mark.parametrize("kind", STATES)
def test_folders_of_torch_are_imported(run_ranks, tmp_path, capsys, kind):
    old, new = tmp_path / "old", tmp_path / "new"
    expected = run_ranks(save_states, 2, old, kind, "fully_shard")[0]
    step = [] if kind == "raw" else ["--step", "8"]  # which is in no folder but the raw one
    assert command(["import", str(old), str(new), *step]) == 0
    assert Checkpointer(new).verify() == []
    assert Checkpointer(new).steps() == [8]
    run_ranks(load_states, 2, new, kind, "fully_shard", expected)
    run_ranks(load_states, 1, new, kind, "plain", expected)
    export = ["export", str(new), str(tmp_path / "torch"), "--to", "dcp"]
    if kind == "raw":
        assert command(export) == 1
        assert "optimizer has numbers in the place of names" in capsys.readouterr().err
    else:
        assert command(export) == 0
        run_ranks(read_exported, 2, tmp_path / "torch", "fully_shard", expected, step=8)


# --- torch reads ours ------------------------------------------------------------------------


def read_by_torch(folder, layout, expected):
    """Load the tensors of a commit by torch's reader of safetensors."""
    model = net(layout, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    states = dict(
        zip(("model", "optimizer"), of_torch.get_state_dict(model, optimizer), strict=True)
    )
    tensors = {
        "model": {key: each for key, each in states["model"].items() if key != "head.weight"},
        "optimizer": {"state": states["optimizer"]["state"]},
        "average": torch.zeros(5),
    }
    dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))
    of_torch.set_optimizer_state_dict(
        model, optimizer, {**states["optimizer"], **tensors["optimizer"]}
    )
    model.load_state_dict(tensors["model"], strict=False)
    assert_same_values(values_of(model, optimizer), expected)
    assert tensors["average"].tolist() == [0, 1, 2, 3, 4]


def save_ours(folder, layout):
    torch.manual_seed(dist.get_rank())
    model, optimizer = trained(layout, 2)
    own = {"position": dist.get_rank(), "noise": torch.ones(2) * dist.get_rank()}
    Checkpointer(folder).save(7, model, optimizer, average=torch.arange(5.0), **own)
    return values_of(model, optimizer)


@pytest.mark.extras
@pytest.mark.parametrize("layout", ["fully_shard", "replicate", "columns"])
def test_the_reader_of_torch_reads_the_tensors_of_a_commit(run_ranks, tmp_path, layout):
    expected = run_ranks(save_ours, 2, tmp_path, layout)[0]
    for num_ranks, loaded_as in ((1, "plain"), (2, "fully_shard"), (3, "replicate")):
        run_ranks(read_by_torch, num_ranks, tmp_path / "step-7", loaded_as, expected)


def read_exported(folder, layout, expected, step=7):
    model = net(layout, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    states = of_torch.get_state_dict(model, optimizer)
    state = {**dict(zip(("model", "optimizer"), states, strict=True)), "step": 0}
    dcp.load(state, checkpoint_id=folder)
    given = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    of_torch.set_state_dict(model, optimizer, **given)
    assert state["step"] == step
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert_same_values(values_of(model, optimizer), expected)


@pytest.mark.extras
@pytest.mark.parametrize("layout", ["fully_shard", "replicate"])
def test_what_is_exported_for_torch_is_read_by_a_plain_load(run_ranks, tmp_path, layout):
    expected = run_ranks(save_ours, 2, tmp_path / "run", layout)[0]
    out = tmp_path / "out"
    assert command(["export", str(tmp_path / "run"), str(out), "--to", "dcp"]) == 0
    run_ranks(read_exported, 1, out, "plain", expected)
    run_ranks(read_exported, 2, out, "fully_shard", expected)
    run_ranks(load_states, 2, out, "", "fully_shard", expected)  # and by ours


# --- plain state dicts -----------------------------------------------------------------------


@on_ranks(2)
def test_a_plain_state_dict_is_saved_and_filled_in_the_place_of_a_model(tmp_path):
    model, other, checkpointer = net("fully_shard"), net("fully_shard", 3), Checkpointer(tmp_path)
    expected = values_of(model)
    checkpointer.save(1, model.state_dict())
    checkpointer.save(2, model)
    for step in (1, 2):
        for into in (other.state_dict(), other):
            with torch.no_grad():
                for param in other.parameters():
                    param.zero_()
            loaded = checkpointer.load(into, step=step)
            assert (loaded.missing, loaded.unexpected) == ([], [])
            assert_same_values(values_of(other), expected)


@on_ranks(2)
def test_what_is_filled_in_a_plain_state_dict_reaches_the_next_forward(tmp_path):
    model = meshard.fully_shard(seeded(nn.Linear(4, 4)), reshard_after_forward=False)
    checkpointer, x = Checkpointer(tmp_path), torch.ones(1, 4)
    expected = model(x).detach().clone()
    checkpointer.save(1, model.state_dict())
    model.reshard()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model(x)
    checkpointer.load(model.state_dict())
    assert torch.equal(model(x), expected)


def test_a_state_dict_that_lacks_a_name_or_has_another_shape_is_refused(tmp_path):
    checkpointer, state = Checkpointer(tmp_path), {"a": torch.arange(3.0), "b": torch.ones(2)}
    checkpointer.save(1, state)
    into = {name: torch.zeros_like(each) for name, each in state.items()}
    tensors = dict(into)
    checkpointer.load(into)
    assert_same_values(into, state)
    assert all(into[name] is tensors[name] for name in state)
    for wrong, text in (
        ({"a": torch.zeros(3)}, "model.b is in the checkpoint"),
        ({**tensors, "c": torch.zeros(1)}, "model.c is not in the checkpoint"),
        ({**tensors, "b": torch.zeros(5)}, "model.b has shape"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(text)):
            checkpointer.load(wrong)
    assert_same_values(tensors, state)


# --- values ----------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = "r"
    BLUE = ("b", 2)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 5


class Name(str, enum.Enum):
    FIRST = "first"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: float
    y: object = None


Pair = collections.namedtuple("Pair", "one two")


class Outer:
    class Inner(enum.Enum):
        A = 1


VALUES = {
    "enum": [Color.RED, Color.BLUE, Level.HIGH, Name.FIRST, Outer.Inner.A, signal.SIGINT],
    "flag": [Access.READ, Access.READ | Access.WRITE, Access(0)],
    "enum as a key": {Color.RED: 1, Level.LOW: {Color.BLUE: 2}},
    "named tuple": Point(1.5, Pair((1, 2), [Point(0.0)])),
    "named tuple of tensors": Pair(torch.arange(3), Point(float("nan"), torch.ones(2, 2))),
    "deque": collections.deque([1, (2, "x"), torch.ones(2)]),
    "deque with maxlen": collections.deque([3, 4], maxlen=2),
    "empty deque": collections.deque(maxlen=0),
    "defaultdict": collections.defaultdict(list, {"a": [1], 2: [torch.zeros(1)]}),
    "defaultdict of int": collections.defaultdict(int, {(1, 2): 3}),
    "defaultdict of nothing": collections.defaultdict(None, {"$": 1}),
    "frozenset": frozenset({1, "a", (2, 3), frozenset({None})}),
    "set of frozensets": {frozenset({1}), frozenset()},
    "frozenset as a key": {frozenset({1, 2}): "x"},
    "tuple": ((), (1,), [(), {}]),
    "floats": [0.0, -0.0, 1e-320, float("inf"), float("-inf"), float("nan"), 0.1],
    "texts": ["", "\0", "\ud800", "ä", "$"],
}


def numpy_values():
    np = pytest.importorskip("numpy")
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    return {
        "arrays": [
            np.arange(3), table, table.T, table[:, ::2], np.array(2.5), np.zeros((0, 3)),
            np.array([True, False]), np.array([1 + 2j], dtype=np.complex64),
            np.array([1.5, np.nan], dtype=np.float16), np.arange(3, dtype=np.uint16),
        ],
        "scalars": [
            np.float32(0.1), np.float64(0.1), np.float16("inf"), np.int64(-3), np.uint8(255),
            np.bool_(True),
        ],
        "array in a named tuple": Point(1.0, np.ones(2)),
        "scalar as a key": {np.int64(3): 1},
    }  # fmt: skip


def assert_same(found, value, at):
    """Compare values and all types."""
    assert type(found) is type(value), f"{at}: {type(found)} is not {type(value)}"
    if isinstance(value, torch.Tensor):
        assert found.dtype == value.dtype and torch.equal(found, value), at
    elif type(value).__module__ == "numpy":
        assert (found.dtype, found.shape) == (value.dtype, value.shape), at
        assert found.tobytes() == value.tobytes(), at
    elif isinstance(value, dict):
        assert getattr(found, "default_factory", 0) == getattr(value, "default_factory", 0), at
        assert len(found) == len(value), at
        for (one, each), (other, expected) in zip(found.items(), value.items(), strict=True):
            assert_same(one, other, f"{at}, key {other!r}")
            assert_same(each, expected, f"{at}[{other!r}]")
    elif isinstance(value, (list, tuple, collections.deque)):
        assert getattr(found, "maxlen", 0) == getattr(value, "maxlen", 0), at
        assert len(found) == len(value), at
        for number, (one, other) in enumerate(zip(found, value, strict=True)):
            assert_same(one, other, f"{at}[{number}]")
    elif isinstance(value, float):
        assert repr(found) == repr(value), at
    else:
        assert found == value, at


class WithExtraState(nn.Module):
    def __init__(self, state=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


def check_value(folder, value):
    """Save as a plain value, in a state and as extra state of a module; compare what returns."""
    checkpointer = Checkpointer(folder)
    given = copy.deepcopy(value)
    checkpointer.save(1, WithExtraState(value), beside=value, stateful=Stateful(value=value))
    model, stateful = WithExtraState(), Stateful()
    extra = checkpointer.load(model, stateful=stateful).extra
    assert_same(value, given, "what was given")
    assert_same(extra["beside"], value, "a plain value")
    assert_same(stateful.state, {"value": value}, "a state")
    assert_same(model.state, value, "extra state")


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_comes_back_as_it_was(tmp_path, kind):
    check_value(tmp_path, VALUES[kind])


@pytest.mark.extras
def test_arrays_and_numbers_of_numpy_come_back_as_they_were(tmp_path):
    for number, value in enumerate(numpy_values().values()):
        check_value(tmp_path / str(number), value)


@on_ranks(2)
def test_values_of_such_kinds_that_differ_come_back_to_each_rank(tmp_path):
    rank, checkpointer = dist.get_rank(), Checkpointer(tmp_path)
    value = collections.deque([Point(rank, [Color.RED, Color.BLUE][rank])], maxlen=3 + rank)
    model, stateful = WithExtraState(value), Stateful()
    checkpointer.save(1, model, beside=value, stateful=Stateful(value=value))
    model.state = None
    extra = checkpointer.load(model, stateful=stateful).extra
    for found in (extra["beside"], stateful.state["value"], model.state):
        assert_same(found, value, "a value")


def test_what_can_be_saved_can_be_loaded_however_deep_it_is(tmp_path):
    for depth in (50, 150, 250, 350, 450):
        value = 1
        for _ in range(depth):
            value = (value,)
        checkpointer = Checkpointer(tmp_path / str(depth))
        try:
            checkpointer.save(1, nn.Linear(1, 1), deep=value)
        except CheckpointError:
            assert depth > 150
            continue
        assert checkpointer.load(nn.Linear(1, 1)).extra["deep"] == value


def local_class():
    class Local(enum.Enum):
        A = 1

    return Local.A


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (local_class(), "Local"),
        (collections.namedtuple("Lost", "a")(1), "Lost"),
        (collections.defaultdict(lambda: 0, a=1), "defaultdict"),
        (object(), "object"),
    ],
)
def test_a_value_whose_class_or_function_has_no_name_is_refused(tmp_path, value, name):
    with pytest.raises(CheckpointError, match=rf"\b{name}\b"):
        Checkpointer(tmp_path).save(1, nn.Linear(1, 1), beside={"a": [1, value]})
    assert Checkpointer(tmp_path).steps() == []


@pytest.mark.parametrize("value", [Color.RED, Point(1.0), Access.READ | Access.WRITE])
def test_a_class_that_is_not_there_any_more_is_named(tmp_path, monkeypatch, value):
    Checkpointer(tmp_path).save(1, nn.Linear(1, 1), beside=[value])
    name = type(value).__name__
    monkeypatch.delattr(sys.modules[__name__], name)
    model = nn.Linear(1, 1)
    before = values_of(model)
    with pytest.raises(CheckpointError, match=rf"\b{name}\b"):
        Checkpointer(tmp_path).load(model, beside=None)
    assert_same_values(values_of(model), before)
    (text,) = Checkpointer(tmp_path).load(model).missing  # the weights need no such class
    assert re.search(rf"beside.*\b{name}\b", text)


called = []


class Trap:
    """No enum and no named tuple: whatever is done with it would be a call of what a file names."""

    def __new__(cls, *args, **kwargs):
        called.append(args)

    def __class_getitem__(cls, name):
        called.append(name)

    _fields = ("x", "y")
    _make = classmethod(lambda cls, *args: called.append(args))
    RED = property(lambda self: called.append("RED"))


@pytest.mark.parametrize("value", [Color.RED, Point(1.0), collections.defaultdict(list)])
def test_a_file_that_names_another_class_or_function_calls_nothing(tmp_path, value):
    Checkpointer(tmp_path).save(1, nn.Linear(1, 1), beside=[value])
    path = tmp_path / "step-1" / "manifest.json"
    content = json.dumps(json.loads(path.read_text())["content"], separators=(",", ":"))
    names = {Color: [b"Trap", b"called.append"], Point: [b"Trap", b"called.append"]}
    for name in names.get(type(value), [b"Trap", b"exit", b"eval"]):
        old = b"list" if isinstance(value, dict) else type(value).__name__.encode()
        text, count = re.subn(rb"\b%s\b" % old, name, content.encode())
        assert count
        checksum = hashlib.sha256(text).hexdigest().encode()
        path.write_bytes(b'{"checksum":"sha256:%s","content":%s}' % (checksum, text))
        with pytest.raises(CheckpointError):
            Checkpointer(tmp_path).load(nn.Linear(1, 1), beside=None)
        assert Checkpointer(tmp_path).load(nn.Linear(1, 1)).missing
    assert called == []


# --- an error that was told ------------------------------------------------------------------


@pytest.fixture
def small_files():
    """Let no file be longer than a megabyte, until the fixture is called."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MiB, before[1]))
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("then", ["save", "async_save", "load", "wait"])
def test_an_error_that_a_handle_has_raised_is_not_raised_again(tmp_path, small_files, then):
    model = nn.Linear(1000, 1000)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, nn.Linear(1, 1))
    handle = checkpointer.async_save(2, model)
    with pytest.raises(CheckpointError, match="step 2 was not saved"):
        handle.wait()
    small_files()
    if then == "save":
        checkpointer.save(3, model)
    elif then == "async_save":
        checkpointer.async_save(3, model).wait()
    elif then == "load":
        assert checkpointer.load(nn.Linear(1, 1)).step == 1
    else:
        checkpointer.wait()
    assert checkpointer.steps() == ([1, 3] if "save" in then else [1])


@pytest.mark.parametrize("then", ["save", "load", "wait"])
def test_an_error_that_was_not_told_yet_is_raised_by_the_next_call(tmp_path, small_files, then):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, nn.Linear(1, 1))
    checkpointer.async_save(2, nn.Linear(1000, 1000))
    calls = {
        "save": lambda: checkpointer.save(3, nn.Linear(1, 1)),
        "load": lambda: checkpointer.load(nn.Linear(1, 1)),
        "wait": checkpointer.wait,
    }
    with pytest.raises(CheckpointError, match="step 2 was not saved"):
        calls[then]()
    calls[then]()


# --- what it costs ---------------------------------------------------------------------------


def run_python(code, *arguments):
    """Run code in a new process with one thread; return what it prints as JSON."""
    environ = {
        **os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True, text=True, timeout=240, env=environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


PEAKS = """
import json, sys
import torch
from meshard.checkpoint import Checkpointer

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) * 1024

def growth(call):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is counted from now on
    before = status("VmRSS")
    call()
    return status("VmHWM") - before

folder, dtype, shape, how = sys.argv[1], getattr(torch, sys.argv[2]), sys.argv[3], sys.argv[4]
model = torch.nn.Module()
table = torch.ones(json.loads(shape), dtype=dtype)
model.register_buffer("table", table.t() if how == "transposed" else table)
checkpointer = Checkpointer(folder)
checkpointer.save(0, torch.nn.Linear(1, 1))
checkpointer.load(torch.nn.Linear(1, 1))
saved = growth(lambda: checkpointer.save(1, model))
model.table.zero_()
loaded = growth(lambda: checkpointer.load(model))
assert model.table.min() == 1
copied = growth(lambda: checkpointer.async_save(2, model).wait())
print(json.dumps([saved, loaded, copied, table.nbytes]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "shape", "how"),
    [
        ("uint8", (1, 10**8), ""),
        ("float32", (1, 10**8), ""),
        ("float32", (2, 5 * 10**7), ""),
        ("float32", (10**8, 1), ""),
        ("float32", (10**4, 10**4), ""),
        ("float32", (1, 1, 10**8), ""),
        ("float32", (25 * 10**6, 4), "transposed"),
    ],
)
def test_saves_and_loads_of_any_shape_need_no_more_than_32_mib(tmp_path, dtype, shape, how):
    peaks = run_python(PEAKS, tmp_path, dtype, list(shape), how)
    saved, loaded, copied, size = (each / MiB for each in peaks)
    slack = 16  # for what torch and Python take in passing
    assert saved <= 32 + slack, f"save took {saved:.0f} MiB beside {size:.0f}"
    assert loaded <= 32 + slack, f"load took {loaded:.0f} MiB beside {size:.0f}"
    assert copied <= size + 32 + slack, f"async_save took {copied:.0f} MiB beside {size:.0f}"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8, bias=False)


@pytest.mark.slow
def test_ten_thousand_small_tensors_with_adamw_take_at_most_8_mb(tmp_path):
    def built(value):
        model = nn.Module()
        model.layers = nn.ModuleList(Block() for _ in range(10_000))
        optimizer = torch.optim.AdamW(model.parameters())
        for number, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, value + number % 7)
        optimizer.step()
        return model, optimizer

    model, optimizer = built(1.0)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model, optimizer)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    other, loaded = built(2.0)
    checkpointer.load(other, loaded)
    assert_same_values(values_of(other, loaded), values_of(model, optimizer))
    assert size <= 8_000_000, f"{size / 1e6:.1f} MB on disk"


COMMANDS = """
import json, runpy, sys
sys.argv[0] = "meshard.checkpoint"
try:
    runpy.run_module("meshard.checkpoint", run_name="__main__", alter_sys=True)
except SystemExit as end:
    print(json.dumps([end.code, "torch" in sys.modules]))
"""


@pytest.mark.parametrize(
    "arguments", [["list"], ["show"], ["show", "--step", "1"], ["prune", "--keep", "1"]]
)
def test_commands_that_read_json_do_not_import_torch(tmp_path, arguments):
    model, optimizer = trained("plain")
    for step in (1, 2):
        Checkpointer(tmp_path).save(step, model, optimizer)
    name, *others = arguments
    assert run_python(COMMANDS, name, tmp_path, *others) == [0, False]
    assert Checkpointer(tmp_path).steps() == ([2] if name == "prune" else [1, 2])
