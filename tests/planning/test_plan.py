import functools
import importlib
import json
import logging
import resource
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import meshard
from examples import plan_models
from meshard.planning import plan
from tests.planning.jobs import make_job
from tests.support.extensions import Int8OnWire, with_matrices_as
from tests.support.models import MlpBlock
from tests.support.ranks import on_fake_ranks
from tests.support.spread import mostly_slow

WIDTH = 256


def mlp(*, shard=meshard.fully_shard, depth=6, width=WIDTH, device="cuda", **options):
    """Return a model whose parameters divide evenly, without biases."""
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    for module in (*model, model) if shard is meshard.fully_shard else [model]:
        shard(module, **options)
    return model


def mlp_job(*, width=WIDTH, device="cuda", **options):
    model = mlp(width=width, device=device, **options)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.ones(4, width, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@functools.cache
def usual_plan():
    return plan(mlp_job, world_size=8)


@functools.cache
def plan_of_llama():
    job = partial(plan_models.job, "llama:8b", reshard=False)
    return plan(job, world_size=4096, ranks_per_node=8, steps=1)


def num_params(depth=6, width=WIDTH):
    return depth * width * width


# --- what is sent --------------------------------------------------------------------------


# --- what is alive -------------------------------------------------------------------------


def test_state_takes_sixteen_bytes_for_each_parameter():
    planned = usual_plan()
    steps = 6 * 4  # one number of AdamW for each parameter
    assert planned.state_bytes == 16 * num_params() // 8 + steps


def test_offloaded_state_is_in_host_memory():
    job = partial(mlp_job, offload_policy=meshard.CPUOffloadPolicy())
    planned = plan(job, world_size=8)
    assert planned.bytes_by_kind["params"] == planned.bytes_by_kind["optimizer"] == 0
    assert planned.host_bytes >= planned.state_bytes
    assert planned.peak_bytes < planned.host_bytes + 6 * 4 * WIDTH * WIDTH


def test_an_optimizer_that_steps_in_host_memory_is_planned():
    def job():
        model = mlp(offload_policy=meshard.CPUOffloadPolicy())
        optimizer = meshard.overlap_optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)

        def step():
            model(torch.ones(4, WIDTH, device="cuda")).sum().backward()
            optimizer.step()

        return step

    planned = plan(job, world_size=8)
    assert planned.state_bytes == 8 * num_params() // 8
    assert planned.host_bytes >= planned.state_bytes
    assert planned.bytes_by_kind["optimizer"] == 0


@pytest.mark.parametrize("ending", ["resharded", "a part alone", "unsharded"])
def test_state_is_counted_once_however_a_step_ends(ending):
    def job():
        model = mlp(reshard_after_forward=False)

        def step():
            x = model(torch.ones(4, WIDTH))
            (model[0](x) if ending == "a part alone" else x).sum().backward()
            if ending == "unsharded":
                model[0].unshard()

        return step

    assert plan(job, world_size=8).state_bytes == 8 * num_params() // 8


def test_a_root_of_which_only_another_method_runs_is_planned():
    def job():
        model = mlp()
        model.register_buffer("table", torch.ones(WIDTH))
        model.loss = lambda x: model[1](model[0](x)).sum() * model.table.sum()
        meshard.register_fsdp_forward_method(model, "loss")
        return lambda: model.loss(torch.ones(4, WIDTH)).backward()

    planned = plan(job, world_size=8)
    assert [unit.label for unit in planned.units] == list("012345")  # the root has no parameters
    params = planned.moments[-1].bytes_by_kind["params"]
    assert params == 4 * num_params() // 8 + 4 * WIDTH


def test_units_of_several_models_come_in_the_order_in_which_they_ran():
    def job():
        models = [meshard.fully_shard(nn.Linear(size, 1, bias=False)) for size in range(1, 9)]
        return lambda: [each(torch.ones(each.in_features)) for each in reversed(models)]

    planned = plan(job, world_size=2)
    assert [unit.unsharded_bytes // 4 for unit in planned.units] == list(range(8, 0, -1))


def test_parameters_of_a_subclass_are_planned():
    def job():
        model = with_matrices_as(nn.Sequential(nn.Linear(64, 64, bias=False)), Int8OnWire)
        meshard.fully_shard(model)
        return lambda: model(torch.ones(4, 64)).sum().backward()

    planned = plan(job, world_size=2)
    assert planned.state_bytes == 2 * 4 * 64 * 64 // 2
    assert planned.collectives["all_gather"].payload_bytes == 64 * 64 + 4 * 64  # with scales


def test_a_unit_without_an_element_is_planned():
    def job():
        empty, step = meshard.fully_shard(nn.LayerNorm(0)), mlp_job()
        return lambda: (empty(torch.ones(4, 0)), step())

    assert plan(job, world_size=8).wire_bytes == usual_plan().wire_bytes


def test_the_dtype_of_new_tensors_is_the_default_one_of_the_moment():
    def job():
        found.append(torch.zeros(2**20).dtype)
        torch.set_default_dtype(torch.bfloat16)
        found.append(torch.zeros(2**20).dtype)
        torch.set_default_dtype(torch.float32)
        return mlp_job()

    found = []
    plan(job, world_size=2)
    assert found == [torch.float32, torch.bfloat16]


def test_the_parts_add_up():
    planned = plan(partial(mlp_job, reshard_after_forward=False), world_size=8)
    assert sum(planned.bytes_by_kind.values()) == planned.peak_bytes == max(planned.peaks)
    assert max(moment.total for moment in planned.moments) == planned.peaks[-1]
    by_unit = sum(unit.bytes_by_kind["params"] for unit in planned.units)
    assert by_unit == planned.bytes_by_kind["params"] == 4 * num_params() // 8


def test_the_peak_names_its_unit():
    def job():
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4096), nn.Linear(4096, 8))
        for module in (*model, model):
            meshard.fully_shard(module)
        return lambda: model(torch.ones(1, 64)).sum().backward()

    planned = plan(job, world_size=4)
    assert (planned.peak_phase, planned.peak_unit) == ("backward", "1")


def test_a_model_that_is_made_whole_takes_its_memory_before_the_first_step():
    whole = plan(partial(mlp_job, depth=12), world_size=64)
    assert (whole.peak_phase, whole.peak_unit) == ("set-up", "")
    assert whole.peak_bytes == whole.setup_peak_bytes >= 4 * num_params(depth=12)
    assert max(whole.peaks) < whole.setup_peak_bytes
    assert "call to_empty after sharding" in str(whole)


def test_optimizers_of_devices_step_lists_of_tensors():
    """Such kernels have a temporary tensor for each parameter, and a loop has one."""

    def peak_of_step(device):
        planned = plan(partial(mlp_job, device=device), world_size=2, device_type=device)
        return max(each.total for each in planned.moments if each.phase == "optimizer")

    shard_bytes = 4 * WIDTH * WIDTH // 2  # of one parameter
    assert peak_of_step("cuda") - peak_of_step("cpu") > 2 * shard_bytes


def test_a_job_that_disables_logging_is_planned_like_others():
    def job():
        logging.disable()
        return mlp_job()

    plan(mlp_job, world_size=8)  # the first one in a process has a number more
    try:
        assert plan(job, world_size=8) == plan(mlp_job, world_size=8)
    finally:
        logging.disable(logging.NOTSET)


def test_what_is_sent_counts_for_the_unit_whose_gradients_it_has():
    def job():
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4096))
        for module in (*model[:2], model):
            meshard.fully_shard(module)
        return lambda: model(torch.ones(1, 16)).sum().backward()

    units = {unit.label: unit for unit in plan(job, world_size=4).units}
    assert units["(root)"].bytes_by_kind["communication"] >= 4 * 16 * 4096
    assert units["1"].bytes_by_kind["communication"] < 4 * 16 * 64


def test_nothing_is_allocated():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    planned = plan(partial(mlp_job, width=2**16, depth=2), world_size=2, steps=1)
    assert planned.peak_bytes > 16e9
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) * 1024 < 1e9


@pytest.mark.slow
def test_a_published_model_takes_the_state_that_arithmetic_gives():
    planned = plan(partial(plan_models.job, "llama:8b"), world_size=8, steps=1)
    assert round(planned.state_bytes / 1e9, 1) == 16.1


# --- jobs as people write them -------------------------------------------------------------


def test_a_job_may_be_written_for_a_device():
    def job():
        torch.cuda.set_device(torch.cuda.current_device())
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        model = nn.Sequential(MlpBlock(64, 128), MlpBlock(64, 128)).cuda().to("cuda:0")
        for module in (*model, model):
            meshard.fully_shard(module, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        scaler = meshard.ShardedGradScaler("cpu")
        losses = []

        def step():
            inputs = torch.randn(64, 64).pin_memory().to("cuda", non_blocking=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(inputs).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = meshard.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item() + norm.item())
            torch.cuda.synchronize()

        return step

    planned = plan(job, world_size=8)
    assert planned.collectives["reduce_scatter"].count == 2


def test_a_job_may_ask_a_device_for_what_ordinary_programs_ask():
    def job():
        assert torch.cuda.is_available()
        torch.cuda.manual_seed(1)
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        assert not torch.cuda.memory_summary()
        torch.randn(2, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        assert torch.cuda.mem_get_info(0)[0] == torch.cuda.get_device_properties(0).total_memory
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
        model = meshard.fully_shard(nn.Linear(64, 64).to(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        side = torch.cuda.Stream()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def step():
            begin.record()
            with torch.cuda.stream(side):
                side.wait_stream(torch.cuda.current_stream())
                inputs = torch.ones(512, 64, device=0)
                inputs.record_stream(side)
            torch.cuda.current_stream().wait_stream(side)

            def closure():
                optimizer.zero_grad()
                loss = model(inputs.to(0)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
            end.record()
            assert begin.elapsed_time(end) > 0

        return step

    planned = plan(job, world_size=8)
    assert planned.collectives["all_gather"].count == 1
    assert not torch.cuda.is_available()  # as before


def test_collectives_of_others_are_counted_and_marked():
    def job():
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        styles = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        model = meshard.fully_shard(parallelize_module(model, mesh["tp"], styles), mesh["dp"])

        def step():
            loss = model(torch.ones(128, 64)).square().mean()
            loss.backward()
            dist.all_reduce(loss.detach())

        return step

    planned = plan(job, world_size=8, ranks_per_node=4, device_type="cpu")
    others = planned.collectives["all_reduce (others)"]
    # The sum of rows in forward, that of the gradient of the inputs is not needed; and the loss.
    assert (others.count, others.payload_bytes) == (2, 128 * 64 * 4 + 4)
    assert others.wire_bytes_between_nodes == 2 * 4 * 7 // 8
    assert "all_reduce (others)" in str(planned)
    assert {each.op for each in planned.events} == {"all_gather", "reduce_scatter"}


def test_dropout_keeps_a_mask_of_bytes_on_a_device():
    def peak(device_type):
        def job():
            model = meshard.fully_shard(
                nn.Sequential(*(nn.Dropout(0.5) for _ in range(4)), nn.Linear(WIDTH, 1))
            )
            inputs = torch.ones(4096, WIDTH, requires_grad=True)
            return lambda: model(inputs).sum().backward()

        return plan(job, world_size=2, device_type=device_type).bytes_by_kind["activations"]

    num_elements = 4096 * WIDTH
    # Four masks, in float32 on the CPU.
    assert abs(peak("cpu") - peak("cuda") - 4 * 3 * num_elements) < num_elements / 2


def test_kernels_whose_own_memory_is_not_known_are_named():
    def job():
        model = meshard.fully_shard(nn.Conv2d(8, 8, 3))
        return lambda: model(torch.ones(64, 8, 32, 32)).sum().backward()

    on_cpu = plan(job, world_size=2, device_type="cpu")
    assert not any("convolution" in text for text in on_cpu.not_known)
    (text,) = (text for text in plan(job, world_size=2).not_known if "convolution" in text)
    assert text.endswith("for backward: convolution, convolution_backward")


def test_norms_by_torch_and_groups_by_any_name():
    def job():
        init_process_group("gloo")
        model = mlp(depth=2, device="cpu")

        def step():
            model(torch.ones(1, WIDTH)).sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if norm.full_tensor().item() > 0:
                raise ArithmeticError("the norm was computed")

        return step

    assert plan(job, world_size=8).collectives["reduce_scatter"].count == 2


def test_objects_are_gathered_as_if_all_ranks_sent_the_same():
    def job():
        for gather in (dist.gather_object, lambda one, all_: dist.all_gather_object(all_, one)):
            found = [None] * 4
            gather({"a": 1}, found)
            assert found == [{"a": 1}] * 4
        return mlp_job()

    plan(job, world_size=4)


class Tagged(nn.Parameter):
    """A parameter of a class that changes no operator."""


def test_parameters_of_a_class_of_their_own_are_planned():
    def job():
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        layer.weight = Tagged(layer.weight.detach())
        model = meshard.fully_shard(layer)
        return lambda: model(torch.ones(4, WIDTH)).sum().backward()

    assert plan(job, world_size=2).state_bytes == 8 * WIDTH * WIDTH // 2


def test_a_closure_is_no_part_of_the_step_of_its_optimizer():
    def job(by_closure):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(1024, WIDTH)).sum()
            loss.backward()
            return loss

        def step():
            if by_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()

        return step

    plans = [plan(partial(job, each), world_size=8) for each in (False, True)]
    assert plans[0].peak_phase == "backward"
    assert plans[0].bytes_by_kind == plans[1].bytes_by_kind
    assert plans[0].units == plans[1].units


def test_models_of_before_are_not_changed():
    def job():
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def step():
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()

        return step

    model = nn.Linear(4, 4)
    before = model.weight.clone()
    with pytest.raises(RuntimeError, match="make models inside the job"):
        plan(job, world_size=2)
    assert torch.equal(model.weight, before)


def test_a_job_without_tensors_is_refused():
    with pytest.raises(RuntimeError, match="has made no tensor"):
        plan(lambda: lambda: None, world_size=2)


def test_ranks_differ_where_rows_do_not_divide():
    def job():
        model = meshard.fully_shard(nn.Linear(1000, 9, bias=False))
        return lambda: model(torch.ones(1, 1000)).sum().backward()

    first, last = (plan(job, world_size=4, rank=rank) for rank in (0, 3))
    assert first.units[0].shard_bytes == last.units[0].shard_bytes == 3 * 1000 * 4
    assert first.units[0].padding_bytes == 3 * 1000 * 4


@torch.library.custom_op("meshard_tests::without_shape", mutates_args=())
def without_shape(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


without_shape.register_autograd(lambda ctx, grad: grad)


@pytest.mark.parametrize(("rows", "outcome"), [(64, "named"), (2**17, "refused")])
def test_operators_without_a_shape_are_named(rows, outcome):
    def job():
        model = meshard.fully_shard(nn.Linear(1024, 1024, device="cuda"))

        def step():
            without_shape(model(torch.ones(rows, 1024, device="cuda"))).sum().backward()

        return step

    if outcome == "named":
        planned = plan(job, world_size=2)
        assert "meshard_tests.without_shape" in "; ".join(planned.not_known)
    else:
        with pytest.raises(RuntimeError, match=r"meshard_tests.without_shape.*register_fake"):
            plan(job, world_size=2)


# --- after a plan --------------------------------------------------------------------------


def trained():
    torch.manual_seed(0)
    model = meshard.fully_shard(MlpBlock(8, 16))
    model(torch.ones(2, 8)).square().sum().backward()
    return [param.grad.full_tensor() for param in model.parameters()]


@pytest.mark.parametrize("fails", [False, True])
def test_a_plan_leaves_the_process_as_it_was(fails):
    def raising():
        raise ArithmeticError("in the job")

    logger = logging.getLogger("meshard")
    before = torch.UntypedStorage.resize_, dist.init_process_group, logger.level
    if fails:
        with pytest.raises(ArithmeticError, match="in the job"):
            plan(raising, world_size=8)
    else:
        plan(mlp_job, world_size=8)
    assert not dist.is_initialized()
    assert before == (torch.UntypedStorage.resize_, dist.init_process_group, logger.level)
    gradients = trained()
    dist.destroy_process_group()
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_a_module_that_a_job_imports_first_gets_the_functions_of_torch(tmp_path, monkeypatch):
    def job():
        importlib.import_module("imported_in_job").init_process_group("nccl")
        return mlp_job()

    text = "from torch.distributed import init_process_group"
    (tmp_path / "imported_in_job.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    plan(job, world_size=2)
    assert sys.modules.pop("imported_in_job").init_process_group is init_process_group


@on_fake_ranks(4)
def test_a_process_with_a_group_is_refused():
    with pytest.raises(RuntimeError, match="in a process of its own"):
        plan(mlp_job, world_size=4)


@pytest.mark.parametrize(
    ("job", "options", "error", "text"),
    [
        (3, {}, TypeError, "not callable"),
        (lambda: None, {}, TypeError, "must return a function that runs one step"),
        (mlp_job, {"rank": 8}, ValueError, "rank=8, world_size=8"),
        (mlp_job, {"steps": 0}, ValueError, "steps=0"),
    ],
)
def test_wrong_arguments_are_refused(job, options, error, text):
    with pytest.raises(error, match=text):
        plan(job, world_size=8, **options)


# --- what is shown -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "fits"), [(10**12, True), ("80GB", True), ("1 MiB", False), ("0.5kB", False)]
)
def test_limits_have_units(limit, fits):
    assert usual_plan().fits(limit) is fits


@pytest.mark.parametrize("limit", ["80", "80 gigs", "GB", "", "1.2.3GB"])
def test_limits_that_are_no_sizes_are_refused(limit):
    with pytest.raises(ValueError, match="80GB or 16GiB"):
        usual_plan().fits(limit)


def test_a_screen_has_eighty_columns():
    text = str(plan_of_llama())
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 40
    for word in ("peak", "activations", "all_gather", "not known", "blocks."):
        assert word in text


@pytest.mark.parametrize("recompute", mostly_slow([True, False], False))
def test_only_blocks_without_a_checkpoint_are_to_be_checkpointed(recompute):
    job = partial(plan_models.job, "llama:8b", batch=8, recompute=recompute)
    planned = plan(job, world_size=64, steps=1)
    assert {unit.label: unit.is_recomputed for unit in planned.units} == {
        "(root)": False,
        **{f"blocks.{index}": recompute for index in range(32)},
    }
    assert ("checkpoint it" in str(planned)) is not recompute


def test_a_setting_that_is_in_force_is_not_advised():
    def job():
        model = mlp(reshard_after_forward=True)
        model.set_reduce_scatter_max_input_buffers(1)
        return lambda: model(torch.ones(1, WIDTH, device="cuda")).sum().backward()

    advised = ("reshard_after_forward=True", "set_reduce_scatter_max_input_buffers(1)")
    usual = str(plan_of_llama())
    assert advised[0] in usual
    assert advised[1] not in usual  # it is the default on a device
    text = str(plan(job, world_size=64))
    assert not any(each in text for each in advised)


def test_no_warning_says_that_buffers_have_no_values(recwarn):
    def job():
        model = nn.Sequential(nn.Linear(2, 2, device="meta"))
        model.register_buffer("angles", torch.ones(2, device="meta"), persistent=False)
        meshard.fully_shard(model)
        model.to_empty(device="cuda")
        return lambda: model(torch.ones(1, 2, device="cuda")).sum().backward()

    plan(job, world_size=8)
    assert not recwarn.list


def test_json_has_all_fields():
    planned = usual_plan()
    loaded = json.loads(planned.to_json())
    assert loaded["peak_bytes"] == planned.peak_bytes
    assert loaded["collectives"]["all_gather"]["count"] == 12
    assert loaded["moments"][0]["bytes_by_kind"].keys() == planned.bytes_by_kind.keys()


@pytest.mark.extras
def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    usual_plan().plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_the_first_difference_to_a_run_is_named():
    planned = plan(partial(make_job, "gpt"), world_size=2, device_type="cpu")
    ran = SimpleNamespace(events=[*planned.events[:3], *planned.events[4:]])
    compared = planned.compare(ran)
    third, fourth = planned.events[3:5]
    assert compared.first_difference == (
        f"collective 3: planned {third.op} of {third.unit} with {third.payload_bytes:,} bytes, "
        f"ran {fourth.op} of {fourth.unit} with {fourth.payload_bytes:,} bytes"
    )
    assert compared.peak_ratio is None
    assert str(compared) == compared.first_difference
