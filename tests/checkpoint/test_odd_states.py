"""States that are not the usual ones, and folders that hold something else too."""

import contextlib
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import meshard
from meshard.checkpoint import Checkpointer, CheckpointError
from tests.checkpoint.layouts import lay_out
from tests.checkpoint.runs import Odd, assert_same_values, values_of
from tests.support.cases import CASES
from tests.support.models import seeded
from tests.support.ranks import on_ranks, on_threads
from tests.support.sharding import shard_blocks
from tests.support.threads import run_threads


class Loader:
    """Of which each rank has another state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@on_ranks(2)
def test_what_differs_between_ranks_comes_back_to_each(tmp_path):
    model, checkpointer, rank = nn.Linear(1, 1), Checkpointer(tmp_path), dist.get_rank()
    state = {"at": rank, "seen": {3: b"x", "y": (1, float("inf"))}}
    own, order = torch.tensor([10.0 + rank]), torch.full((4,), rank, dtype=torch.uint8)
    loader = Loader({**state, "order": order})
    mix = {"web": 1, "books": 2, "code": {1.5: float("nan")}}
    checkpointer.save(1, model, loader=loader, x=own, tokens=5, rank=rank, mix=mix)
    loader.state, into = None, torch.zeros(1)
    extra = checkpointer.load(model, loader=loader, x=into, mix={}).extra
    assert torch.equal(into, own)
    assert torch.equal(loader.state.pop("order"), order)
    assert loader.state == state
    assert list(extra.pop("mix")) == ["web", "books", "code"]
    assert extra == {"tokens": 5, "rank": rank}
    assert torch.equal(checkpointer.load(model).extra["x"], own)


def kept_beside(model, rank):
    """Return a dict with tensors: shards, one that is the same on all ranks and one that is not."""
    ema = {name: param.detach().clone() for name, param in model.named_parameters()}
    return {"ema": ema, "history": [torch.arange(3), (torch.tensor([5.0 + rank]), "text")], 3: 4}


def test_a_value_that_differed_between_other_ranks_is_said_to_be_missing(tmp_path):
    model = nn.Linear(1, 1)

    def save():
        own = {"position": dist.get_rank(), "loader": Loader([dist.get_rank()] * 1000)}
        Checkpointer(tmp_path).save(1, model, tokens=3, **own)

    run_threads(save, 2)
    loaded = Checkpointer(tmp_path).load(nn.Linear(1, 1))
    text = "{} was saved by each of 2 ranks for itself, and there are 1 here"
    assert (loaded.missing, loaded.extra) == ([text.format("position")], {"tokens": 3})
    with pytest.raises(CheckpointError, match=text.format("loader")):
        Checkpointer(tmp_path).load(nn.Linear(1, 1), loader=Loader(None))


def test_a_number_of_a_type_that_has_no_plain_one_is_refused(tmp_path):
    numpy = pytest.importorskip("numpy")
    with pytest.raises(CheckpointError, match=r"is a numpy\.longdouble, which a"):
        Checkpointer(tmp_path).save(1, nn.Linear(1, 1), x=numpy.longdouble(1))


@on_ranks(4)
def test_tensors_in_lists_and_dicts_are_filled_and_what_is_not_given_is_returned(tmp_path):
    (model, _), checkpointer, rank = lay_out("hsdp"), Checkpointer(tmp_path), dist.get_rank()
    saved = kept_beside(model, rank)
    checkpointer.save(1, model, beside=saved, means={"loss": torch.tensor(2.0)})
    other = shard_blocks(CASES["mlp_stack"].build())
    into = kept_beside(other, 0)
    tensors = [*into["ema"].values(), into["history"][0], into["history"][1][0]]
    for tensor in tensors:
        tensor.zero_()
    loaded = checkpointer.load(other, beside={**into, "text": 0})
    beside = loaded.extra["beside"]
    found = [*beside["ema"].values(), beside["history"][0], beside["history"][1][0]]
    assert all(one is given for one, given in zip(found, tensors, strict=True))
    assert beside[3] == 4 and beside["history"][1][1] == "text" and "text" not in beside
    assert_same_values(
        {name: each.full_tensor() for name, each in into["ema"].items()},
        {name: each.full_tensor() for name, each in saved["ema"].items()},
    )
    assert into["history"][0].tolist() == [0, 1, 2] and into["history"][1][0] == 5.0 + rank
    assert loaded.extra["means"] == {"loss": torch.tensor(2.0)}


def test_of_a_list_or_dict_only_tensors_that_are_saved_and_fit_are_filled(tmp_path):
    checkpointer, model, kept = Checkpointer(tmp_path), nn.Linear(1, 1), torch.ones(2)
    checkpointer.save(1, model, ema={"a": torch.arange(2.0), "b": torch.arange(3.0)})
    assert checkpointer.load(model, ema={"a": kept}).extra["ema"]["b"].tolist() == [0, 1, 2]
    assert kept.tolist() == [0, 1]
    double = torch.ones(2, dtype=torch.float64)
    for wrong, text in (
        ({"c": torch.ones(2)}, "ema.c is not in the checkpoint"),
        ({"a": torch.ones(3)}, r"ema.a has shape \[2\]"),
        ({"a": double}, "ema.a .*float64"),
        ({"a": torch.ones(2), "by": nn.ReLU()}, r"\['ema'\]\['by'\] is a .*ReLU"),
    ):
        with pytest.raises(CheckpointError, match=text):
            checkpointer.load(model, ema=wrong)
        assert all(each.all() for each in wrong.values() if isinstance(each, torch.Tensor))
    assert checkpointer.load(model, ema={"c": torch.ones(2)}, strict=False).missing == ["ema.c"]
    assert checkpointer.load(model, ema={"a": double}, cast=True).extra["ema"]["a"] is double
    assert double.tolist() == [0, 1]


def test_what_was_saved_as_a_value_fills_a_module_and_an_object(tmp_path):
    checkpointer, model, ema = Checkpointer(tmp_path), nn.Linear(1, 1), Odd(7)
    checkpointer.save(1, model, ema=ema.state_dict(), loader={"order": torch.arange(3)})
    other, loader = Odd(0), Loader({"order": torch.zeros(1)})
    loaded = checkpointer.load(model, ema=other, loader=loader)
    assert torch.equal(other.weight, ema.weight) and other.count == 7
    assert loader.state["order"].tolist() == [0, 1, 2]
    assert (loaded.missing, loaded.unexpected, loaded.extra) == ([], [], {})


def test_an_average_that_begins_as_the_weights_gets_memory_of_its_own(tmp_path):
    checkpointer, model = Checkpointer(tmp_path), nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 5)
    checkpointer.save(1, model, ema=Loader({"shadow": torch.ones(1, 1)}))
    ema = Loader({"shadow": model.weight.data})
    checkpointer.load(model, ema=ema)
    assert (model.weight.item(), ema.state["shadow"].item()) == (5, 1)


@on_ranks(2)
def test_what_differs_may_be_large_and_of_any_shape(tmp_path):
    rank, checkpointer, model = dist.get_rank(), Checkpointer(tmp_path), nn.Linear(1, 1)
    for step in (1, 2):  # the second by the plan of the first
        order = torch.full((2**22 + rank,), rank + step)
        checkpointer.save(step, model, loader=Loader({"at": rank + step, "order": order}))
        other = Loader({"at": -1, "order": torch.full((1,), -1)})
        checkpointer.load(model, loader=other)
        assert other.state["at"] == rank + step
        assert torch.equal(other.state["order"], order)
    assert (tmp_path / "step-2" / "manifest.json").stat().st_size < 10_000
    order = torch.full((5,), 8)
    checkpointer.save(3, model, loader=Loader({"at": 8, "order": order}))  # the same on all ranks
    checkpointer.load(model, loader=other)
    assert torch.equal(other.state["order"], order)


@on_ranks(2)
def test_a_strided_tensor_that_is_equal_on_all_ranks_is_saved_once(tmp_path):
    """It is compared by a copy, so large that reading it too late would be a segmentation fault."""
    strided = torch.ones(1, 1).expand(1, 2**24)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, nn.Linear(1, 1), x=strided)
    assert "x" in checkpointer.manifest(1).tensors
    assert torch.equal(checkpointer.load(nn.Linear(1, 1)).extra["x"], strided)


@on_ranks(2)
def test_extra_state_of_each_rank_comes_back_to_it(tmp_path):
    model, other, checkpointer = Odd(0), Odd(9), Checkpointer(tmp_path)
    model.count = dist.get_rank()
    checkpointer.save(1, model)
    loaded = checkpointer.load(other)
    assert (other.count, other.amax.item()) == (dist.get_rank(), dist.get_rank())
    assert (loaded.missing, loaded.unexpected) == ([], [])
    plain = nn.Module()
    plain.weight, plain.image = model.weight, model.image
    with pytest.raises(CheckpointError, match=r"model\._extra_state is in the checkpoint, and not"):
        checkpointer.load(plain)


@on_ranks(2)
def test_statistics_of_one_rank_are_not_mixed_with_those_of_another(tmp_path):
    model = meshard.fully_shard(nn.BatchNorm1d(4))
    for buffer in model.buffers():
        buffer.fill_(dist.get_rank() + 1)
    checkpointer = Checkpointer(tmp_path)
    is_told = pytest.warns(UserWarning, match=r"running_mean.* differ between .*per_rank=True")
    with contextlib.nullcontext() if dist.get_rank() else is_told:
        checkpointer.save(1, model)
    checkpointer.load(model)
    assert {int(value) for buffer in model.buffers() for value in buffer.flatten()} == {1}


@on_ranks(2)
def test_stages_of_a_pipeline_are_one_checkpoint(tmp_path):
    rank = dist.get_rank()
    layer = nn.Linear(2, 2)
    stage = nn.ModuleDict({f"{rank}a": layer, f"{rank}b": nn.Linear(2, 2, bias=False)})
    stage[f"{rank}b"].weight = layer.weight
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.1)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    expected = layer.weight.detach().clone()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, stage, optimizer)
    nn.init.zeros_(layer.weight)
    checkpointer.load(stage, optimizer)
    assert torch.equal(layer.weight, expected)
    manifest = checkpointer.manifest()
    assert len(manifest.parts["optimizer"]["state"]) == 4
    assert manifest.ties == {f"model.{n}b.weight": f"model.{n}a.weight" for n in range(2)}
    for name in ("0a.weight", "1a.weight"):
        assert {f"model.{name}", f"optimizer.state.{name}.exp_avg"} <= manifest.tensors.keys()


@on_threads(2)
def test_each_stage_of_a_pipeline_has_hyperparameters_of_its_own_that_are_tensors(tmp_path):
    rank, checkpointer = dist.get_rank(), Checkpointer(tmp_path)
    stage = nn.ModuleDict({f"stage{rank}": nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(stage.parameters(), lr=torch.tensor(float(rank)))
    checkpointer.save(1, stage, optimizer)
    optimizer.param_groups[0]["lr"] = torch.tensor(9.0)
    checkpointer.load(stage, optimizer)
    assert optimizer.param_groups[0]["lr"] == rank
    optimizer = torch.optim.AdamW(
        (model := seeded(nn.Linear(2, 2))).parameters(), lr=torch.tensor(rank)
    )
    with pytest.raises(CheckpointError, match="ranks have different hyperparameters"):
        checkpointer.save(2, model, optimizer)


def test_complex_views_empty_tensors_and_extra_state_that_is_a_tensor(tmp_path):
    class Complex(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.register_buffer("conjugate", torch.full((2,), value + 1j).conj())
            self.register_buffer("empty", torch.zeros(0, 3))
            self.count = torch.tensor(value)

        def get_extra_state(self):
            return self.count

        def set_extra_state(self, state):
            self.count = state

    checkpointer, saved, other = Checkpointer(tmp_path), Complex(7), Complex(2)
    checkpointer.save(1, saved)
    loaded = checkpointer.load(other)
    assert torch.equal(other.conjugate.resolve_conj(), saved.conjugate.resolve_conj())
    assert (other.count, loaded.missing, loaded.unexpected) == (7, [], [])
    checkpointer.save(2, nn.Linear(1, 1))
    missing = checkpointer.load(other, strict=False).missing
    assert sorted(missing) == ["model._extra_state", "model.conjugate", "model.empty"]


@on_threads(4)
def test_experts_on_meshes_of_their_own_need_names_of_their_own(tmp_path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    number = dist.get_rank() // 2
    expert, checkpointer = nn.Linear(4, 4, bias=False), Checkpointer(tmp_path)
    copies = meshard.fully_shard(nn.Sequential(expert), mesh["dp"])
    nn.init.ones_(expert.weight)
    checkpointer.save(1, copies)  # the same on both meshes
    nn.init.constant_(expert.weight, 1 + 0.01 * number)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(2, copies)  # copies that have drifted apart
    nn.init.constant_(expert.weight, number)
    checkpointer = Checkpointer(tmp_path)
    for call in (checkpointer.save, checkpointer.async_save):
        with pytest.raises(CheckpointError, match=r"'model\.0\.weight' has other values on rank 2"):
            call(3, copies)
    named = nn.ModuleDict(
        {f"expert{number}": expert, "dense": meshard.fully_shard(nn.Linear(4, 4))}
    )
    optimizer = torch.optim.SGD(named.named_parameters(), momentum=0.9)
    for param in named.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    nn.init.constant_(expert.weight, number)
    checkpointer.save(4, named, optimizer)
    groups = checkpointer.manifest().parts["optimizer"]["param_groups"]
    names = ["expert0.weight", "dense.weight", "dense.bias", "expert1.weight"]
    assert [name for group in groups for name in group["params"]] == names
    assert all(group["params"] == group["param_names"] for group in groups)
    nn.init.constant_(expert.weight, 9)
    nn.init.zeros_(optimizer.state[expert.weight]["momentum_buffer"])
    checkpointer.load(named, optimizer)
    assert expert.weight.to_local().unique().tolist() == [number]
    assert optimizer.state[expert.weight]["momentum_buffer"].to_local().unique().tolist() == [1]


@on_ranks(4)
def test_copies_whose_vectors_are_rounding_noise_are_saved(tmp_path):
    """Beside tensor parallelism. Numbers may be complex, and on some of the ranks only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    sign = dist.get_rank() // 2 * 2 - 1
    layer = meshard.fully_shard(nn.Linear(4, 4), mesh["dp"])
    nn.init.ones_(layer.weight)
    nn.init.constant_(layer.bias, 1e-9 * sign)
    phases = {"phase": torch.zeros(2, dtype=torch.complex128)} if sign > 0 else {}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, layer, own=phases)
    assert checkpointer.load(layer).step == 1


class Counts(torch.optim.Optimizer):
    """Its parameters share one counter."""

    def __init__(self, params):
        super().__init__(params, {})
        step = torch.zeros(())
        self.state.update(
            {p: {"step": step} for group in self.param_groups for p in group["params"]}
        )

    def step(self, closure=None):
        next(iter(self.state.values()))["step"].add_(1)


def test_a_tensor_that_a_state_shares_stays_shared(tmp_path):
    layer = nn.Linear(2, 2)
    optimizer, checkpointer = Counts(layer.parameters()), Checkpointer(tmp_path)
    optimizer.step()
    checkpointer.save(1, layer, optimizer)
    optimizer.step()
    checkpointer.load(layer, optimizer)
    optimizer.step()
    assert [state["step"].item() for state in optimizer.state.values()] == [2.0, 2.0]


def test_two_tensors_do_not_load_into_one(tmp_path):
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, tied)
    tied[1].weight = tied[0].weight
    with pytest.raises(CheckpointError, match="are tied here, and were saved as 2 tensors"):
        checkpointer.load(tied)


def test_what_others_have_in_the_folder_stays(tmp_path):
    (tmp_path / "step-7" / "rank0").mkdir(parents=True)
    (tmp_path / "step-8").mkdir()
    theirs = (tmp_path / "step-7" / "rank0" / "weights", tmp_path / "step-8" / "notes.txt")
    for path in theirs:
        path.write_text("mine")
    (tmp_path / "step-008").mkdir()
    checkpointer = Checkpointer(tmp_path, keep=1)
    for step in (8, 9, 10):
        checkpointer.save(step, nn.Linear(1, 1))
    checkpointer.wait()
    assert checkpointer.steps() == [10]
    assert [path.read_text() for path in theirs] == ["mine", "mine"]
    assert (tmp_path / "step-008").exists()


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpointer = Checkpointer("run")
    checkpointer.save(1, nn.Linear(1, 1))
    monkeypatch.chdir(os.sep)
    assert checkpointer.latest_step() == 1


@on_ranks(2)
def test_a_step_before_the_highest_is_the_newest_if_it_was_saved_last(tmp_path):
    checkpointer, model = Checkpointer(tmp_path), seeded(nn.Linear(1, 1))
    checkpointer.save(300, model)
    checkpointer.save(110, model)
    assert checkpointer.steps() == [110, 300]
    assert checkpointer.latest_step() == checkpointer.load(model).step == 110


def test_the_folder_of_a_step_is_not_read_as_one_of_torch(tmp_path):
    Checkpointer(tmp_path).save(1, nn.Linear(1, 1), tokens=3)
    with pytest.raises(CheckpointError, match="is the folder of one step; pass the folder that"):
        Checkpointer(tmp_path / "step-1").load(nn.Linear(1, 1))


def test_a_part_that_is_missing_or_of_another_kind_is_refused(tmp_path):
    checkpointer, model = Checkpointer(tmp_path), nn.Linear(1, 1)
    optimizer, loader = torch.optim.SGD(model.parameters()), Loader({})
    checkpointer.save(1, model, average=nn.Linear(1, 1), second=optimizer, rate=3)
    for extra in ({"average": loader}, {"second": loader}, {"rate": optimizer}):
        with pytest.raises(CheckpointError, match=r"was (not )?saved as a"):
            checkpointer.load(model, strict=False, **extra)
    with pytest.raises(CheckpointError, match="tokens is not in the checkpoint"):
        checkpointer.load(model, tokens=0)
    found = checkpointer.load(model, tokens=0, loader=loader, strict=False)
    assert found.missing == ["tokens", "loader"]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "another kind than SGD.*'betas'"),
        (
            lambda m: torch.optim.AdamW([{"params": [m.weight]}, {"params": [m.bias], "lr": 1.0}]),
            "such as 'weight', are in groups of the AdamW with other hyperparameters",
        ),
    ],
)
def test_hyperparameters_of_other_groups_are_refused(tmp_path, make, text):
    model = nn.Linear(2, 2)
    checkpointer, optimizer = Checkpointer(tmp_path), torch.optim.AdamW(model.parameters())
    checkpointer.save(1, model, optimizer)
    other = make(model)
    before = [dict(group) for group in other.param_groups]
    with pytest.raises(CheckpointError, match=text):
        checkpointer.load(model, other)
    assert other.param_groups == before


@pytest.mark.parametrize("number", [float, torch.tensor])
def test_groups_of_other_hyperparameters_do_not_become_one(tmp_path, number):
    model, checkpointer = nn.Linear(2, 2), Checkpointer(tmp_path)
    rates = zip(model.parameters(), (0.1, 0.2), strict=True)
    groups = [{"params": [param], "lr": number(rate)} for param, rate in rates]
    checkpointer.save(1, model, torch.optim.AdamW(groups))
    one = torch.optim.AdamW(model.parameters(), lr=number(0.5))
    with pytest.raises(CheckpointError, match="saved in groups with other hyperparameters"):
        checkpointer.load(model, one)
    assert one.param_groups[0]["lr"] == number(0.5)


def test_keys_of_schedulers_and_of_users_do_not_make_another_kind_of_optimizer(tmp_path):
    model = nn.Linear(2, 2)
    checkpointer, optimizer = Checkpointer(tmp_path), torch.optim.AdamW(model.parameters(), lr=0.5)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # adds "initial_lr"
    checkpointer.save(1, model, optimizer)
    other = torch.optim.AdamW([{"params": list(model.parameters()), "name": "all"}])
    checkpointer.load(model, other)
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert other.param_groups[0]["name"] == "all"


@on_ranks(2)
def test_what_is_wrong_on_one_rank_is_raised_on_all(tmp_path):
    checkpointer, rank, model = Checkpointer(tmp_path), dist.get_rank(), nn.Linear(1, 1)
    for step, extra, text in [
        (-1 if rank else 1, {}, "rank 1: ValueError: step must be an integer"),
        (rank, {}, r"ranks save different steps: \[0, 1\]"),
        (1, {"model.weight" if rank else "note": 1}, r"rank 1: .*'model\.weight' is no name"),
        (1, {"note": 1} if rank else {}, r"rank\(s\) \[0\] do not save 'note'"),
        (1, {"extra": {"a": [1, object() if rank else 1]}},
         r"rank 1: TypeError: the value at \['extra'\]\['a'\]\[1\] is a builtins\.object"),
    ]:  # fmt: skip
        with pytest.raises(CheckpointError, match=text):
            checkpointer.save(step, model, **extra)
    table = nn.Module()
    dtype = torch.bfloat16 if rank else torch.float16
    table.register_buffer("table", torch.ones(2, dtype=dtype))
    with pytest.raises(CheckpointError, match=r"ranks hold 'model\.table' with shape .* in "):
        checkpointer.save(1, table)
    tied = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    if rank == 0:
        tied["b"].weight = tied["a"].weight
    with pytest.raises(
        CheckpointError, match=r"'model\.b\.weight' is tied to 'model\.a\.weight' on"
    ):
        checkpointer.save(1, tied)
    assert checkpointer.steps() == []

    class Scheduler(Loader):
        def load_state_dict(self, state):
            if rank:
                raise LookupError("cannot take it")

    scheduler = Scheduler({"a": 1})
    checkpointer.save(1, model, note=1, scheduler=scheduler)
    with pytest.raises(CheckpointError, match="'random' has a meaning"):
        checkpointer.load(model, **({"random": 1} if rank else {"note": 1}))
    with pytest.raises(CheckpointError, match="rank 1: LookupError: cannot take it"):
        checkpointer.load(model, scheduler=scheduler)


@pytest.mark.parametrize("is_dtensor", [False, True])
@on_ranks(2)
def test_what_a_hook_adds_to_the_state_dict_is_saved_as_tensors(tmp_path, is_dtensor):
    model, checkpointer = nn.Linear(1, 1), Checkpointer(tmp_path)
    added = torch.full((2,), float(dist.get_rank()))
    if is_dtensor:
        added = DTensor.from_local(added, init_device_mesh("cpu", (2,)), [Shard(0)])
    hook = lambda module, state, prefix, local: state.update(added=added)  # noqa: E731
    model.register_state_dict_post_hook(hook)
    checkpointer.save(1, model)
    tensors = checkpointer.manifest().tensors
    shapes = {name: each.shape for name, each in tensors.items() if name.endswith("added")}
    if is_dtensor:
        assert shapes == {"model.added": (4,)}
    else:
        assert shapes == {"rank0/model.added": (2,), "rank1/model.added": (2,)}
    checkpointer.load(model)


@on_ranks(2)
@torch.no_grad()
def test_an_unsharded_module_saves_its_shards_and_loads_if_a_forward_left_it_so(tmp_path):
    model = meshard.fully_shard(nn.Linear(4, 4), reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    checkpointer, x = Checkpointer(tmp_path), torch.ones(1, 4)
    model.unshard()
    checkpointer.save(1, model, optimizer)
    assert checkpointer.manifest().tensors["model.weight"].placements == ["S(0)"]
    expected = model(x)
    model.reshard()
    for param in model.parameters():
        param.zero_()
    model.unshard()
    checkpointer.load(model, optimizer)
    assert torch.equal(model(x), expected)  # gathered anew
    model.reshard()
    for param in model.parameters():
        param.zero_()
    model(x)
    checkpointer.load(model, optimizer)
    assert torch.equal(model(x), expected)  # gathered anew


@on_ranks(3)
def test_a_group_without_the_first_rank_saves_all(tmp_path):
    group = dist.new_group([1, 2])
    if dist.get_rank():
        checkpointer = Checkpointer(tmp_path, process_group=group)
        checkpointer.save(1, seeded(nn.Linear(1, 1)), note={"a": [1, 2]})
        assert checkpointer.load(nn.Linear(1, 1)).extra == {"note": {"a": [1, 2]}}
        assert checkpointer.verify() == []


def test_keys_with_dots_and_many_numbers_are_saved_in_no_time(tmp_path):
    tree = {
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
        "n": {str(n): n for n in range(20000)},
    }
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, nn.Linear(1, 1), tree=tree)
    extra = checkpointer.load(nn.Linear(1, 1)).extra["tree"]
    assert extra["n"] == tree["n"]
    assert (extra["a.b"], extra["a"]["b"]) == (1, 0)


@on_ranks(4)
def test_tensor_parallel_layouts_come_back(tmp_path):
    model, _ = lay_out("tensor_parallel")
    expected = values_of(model)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    checkpointer.load(model)
    assert_same_values(values_of(model), expected)
