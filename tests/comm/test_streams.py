"""Order of reads, writes and reuse of memory on streams."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CommLedger, GradientSync, MixedPrecisionPolicy
from meshard._comm import streams
from meshard._comm.communicator import CommStream, Communicator, Done
from meshard._comm.streams import StreamCommunicator
from meshard.foreach_reduce import Reduction
from tests.support import insides
from tests.support.fake_device import FakeDevice, Recorder, Stream
from tests.support.ranks import fake_group, on_fake_ranks
from tests.support.spread import spread
from tests.support.strategies import MODES
from tests.support.stream_steps import MIXED, StreamRun, make_model, run_steps

HALF = MixedPrecisionPolicy(param_dtype=torch.float16)


@spread(
    mesh_shape=[(4,), (2, 2), (1,), (4, 1), (4,), (4,), (4,)],
    mp_policy=[MixedPrecisionPolicy(), MIXED, HALF],
    reshard=[None, None, None, None, True, False, 2],
)
def test_a_step_has_no_race(monkeypatch, mesh_shape, mp_policy, reshard):
    kwargs = {"mp_policy": mp_policy, "reshard_after_forward": reshard}
    device, recorder = run_steps(monkeypatch, mesh_shape, **kwargs)
    assert device.races == []
    assert recorder.num_checked > 1000
    # A shard group of one rank may have nothing to do on the gather and scatter streams.
    assert len(recorder.streams_used) >= 1 + 2 * (mesh_shape[-1] > 1) + (len(mesh_shape) == 2)


def add_idle(model):
    for block in model[1:4]:
        block.register_parameter("unused", nn.Parameter(torch.ones(8)))
        block.register_parameter("frozen", nn.Parameter(torch.ones(8), requires_grad=False))


@spread(mesh_shape=[(4,), (2, 2)], mp_policy=[MixedPrecisionPolicy(), HALF], is_last=[True, False])
def test_unused_and_frozen_parameters_cause_no_race(monkeypatch, mesh_shape, mp_policy, is_last):
    device, _ = run_steps(
        monkeypatch, mesh_shape, prepare=add_idle, mp_policy=mp_policy, is_last=is_last
    )
    assert device.races == []


def exchange_anything(output, source, received, sent, *, start=dist.all_to_all_single, **kwargs):
    """Start an all-to-all. torch's fake backend fills outputs from the input, so it needs one."""
    if not source.numel():
        source, sent = source.new_zeros(1), [1] + [0] * (len(sent) - 1)
    return start(output, source, received, sent, **kwargs)


# Matrices only are stepped here.
PART = pytest.mark.filterwarnings("ignore:no optimizer has stepped")


def steps_of_owners(monkeypatch, mesh_shape):
    """Train with matrices that one rank steps each, in several batches; return the device."""
    monkeypatch.setattr(dist, "all_to_all_single", exchange_anything)
    with fake_group(torch.Size(mesh_shape).numel()):
        run = StreamRun(monkeypatch, mesh_shape)
        owners = meshard.owner_optimizer(run.model, torch.optim.SGD, lr=0.1, bucket_mb=1e-4)
        with run.recorder:
            for _ in range(3):
                run.window()
                owners.step()
                owners.zero_grad()
    return run.device


@PART
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_exchanges_with_owners_have_no_race(monkeypatch, mesh_shape):
    assert steps_of_owners(monkeypatch, mesh_shape).races == []


@PART
def test_matrices_that_are_used_before_they_have_arrived_are_found_out(monkeypatch):
    start, kept = Communicator.all_to_all, []

    def start_and_forget(self, *args, **kwargs):
        kept.append(start(self, *args, **kwargs))
        return Done(kept[-1].result)

    monkeypatch.setattr(StreamCommunicator, "all_to_all", start_and_forget)
    device = steps_of_owners(monkeypatch, (4,))
    assert any("_foreach_copy_" in race for race in device.races)


def test_a_shard_group_of_one_rank_gathers_nothing(monkeypatch):
    gathered = []
    monkeypatch.setattr(
        StreamCommunicator, "_start_all_gather", lambda *args: gathered.append(args[-1])
    )
    device, _ = run_steps(monkeypatch, (2, 1), mp_policy=MIXED)
    assert gathered == []
    assert device.races == []


def test_a_gather_runs_beside_the_compute_before_it(monkeypatch):
    """The gather of block 3 waits for nothing that block 2 computes."""
    device, log = FakeDevice(), []
    start = StreamCommunicator._start_all_gather

    def start_all_gather(self, output, source, group, label):
        log.append(("gather", label, device.current_stream().clock[device.compute.number]))
        return start(self, output, source, group, label)

    def watch(model):
        model[2][0].register_forward_pre_hook(
            lambda *_: log.append(("compute", "2", device.compute.clock[device.compute.number]))
        )

    monkeypatch.setattr(StreamCommunicator, "_start_all_gather", start_all_gather)
    run_steps(monkeypatch, (4,), device, prepare=watch)
    last = max(place for place, entry in enumerate(log) if entry[0] == "compute")
    gathers = [entry for entry in log[:last] if entry[:2] == ("gather", "3")]
    assert gathers[-1] in log[last - 2 : last]  # issued between block 1 and block 2
    assert gathers[-1][2] <= log[last][2]


@pytest.mark.parametrize("from_optimizer", [True, False])
def test_a_gather_can_wait_for_the_optimizer_alone(monkeypatch, from_optimizer):
    with fake_group(4):
        run = StreamRun(monkeypatch)
        model, device = run.model, run.device
        stream = device.Stream()
        with run.recorder:
            for _ in range(3):
                run.window()
                stream.wait_event(device.current_stream().record_event())
                with device.stream(stream), torch.no_grad():
                    for param in model.parameters():
                        param.to_local().sub_(param.grad.to_local())
                model.zero_grad()
                if from_optimizer:
                    run.comm.gather_after(stream.record_event())
                unrelated = torch.ones(64).mul_(2)
                ticks = device.compute.clock[device.compute.number]
                model.unshard(async_op=True)
                comm_stream = run.comm._streams[CommStream.GATHER]
                assert comm_stream.has_seen(device.compute.number, ticks) is not from_optimizer
                assert unrelated.sum() == 128
    # Without the event, nothing tells the gather to wait for what the optimizer writes.
    assert bool(device.races) is not from_optimizer


def test_work_that_is_dropped_orders_the_stream_that_queued_it_and_no_other():
    """The garbage collector may drop it while another stream is current, and captured."""
    device = FakeDevice()
    comm = StreamCommunicator(device)
    with comm.on_stream(CommStream.SCATTER):
        scatter = device.current_stream()
        ticks = scatter.tick()
        in_flight = comm.record(torch.ones(1))
    captured = device.Stream()
    with device.stream(captured):
        del in_flight
    assert not captured.has_seen(scatter.number, ticks)
    assert device.compute.has_seen(scatter.number, ticks)


def test_a_stream_that_does_not_wait_for_compute_is_found_out(monkeypatch):
    device = FakeDevice()
    wait = Stream.wait_event
    monkeypatch.setattr(
        Stream, "wait_event", lambda self, event: self is device.compute and wait(self, event)
    )
    run_steps(monkeypatch, (4,), device)
    assert any("read by" in race for race in device.races)


def test_a_wait_that_does_not_wait_is_found_out(monkeypatch):
    monkeypatch.setattr(streams.EventHandle, "_order", lambda self, stream: None)
    device, _ = run_steps(monkeypatch, (2, 2))
    assert device.races


def test_dropping_the_input_of_a_reduction_too_early_is_found_out(monkeypatch):
    keeping = property(lambda self: None, lambda self, sent: None)
    monkeypatch.setattr(Reduction, "sent", keeping, raising=False)
    record = StreamCommunicator.record
    monkeypatch.setattr(StreamCommunicator, "record", lambda self, *_, **__: record(self))
    device, _ = run_steps(monkeypatch, (4,))
    assert any("reuse of memory" in race for race in device.races)


def mean_of_four(state, bucket):
    """What works on the current stream, and returns memory of its own."""
    future = torch.futures.Future()
    dist.all_reduce(bucket.buffer())
    future.set_result(bucket.buffer() / 4)
    return future


@pytest.mark.parametrize(
    "mp_policy",
    [
        MixedPrecisionPolicy(),
        MIXED,
        MixedPrecisionPolicy(torch.float16),
        MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    ],
)
@pytest.mark.parametrize("modes", ["F", "NF"])
@pytest.mark.parametrize("hook", [None, mean_of_four])
def test_replicated_gradients_are_reduced_in_their_bucket_without_a_race(
    monkeypatch, hook, modes, mp_policy
):
    device = FakeDevice()
    insides.use_communicator(monkeypatch, lambda _: StreamCommunicator(device))
    with fake_group(4):
        model = make_model()
        model.register_parameter("unused", nn.Parameter(torch.ones(8)))
        meshard.replicate(model, bucket_cap_mb=1e-4, mp_policy=mp_policy)
        if hook is not None:
            model.register_comm_hook(None, hook)
        with Recorder(device) as recorder:
            for _ in range(3):
                for mode in modes:
                    model.set_gradient_sync(MODES[mode])
                    model(torch.ones(2, 5)).sum().backward()
                memory = set()
                with torch.no_grad():
                    for name, param in model.named_parameters():
                        if name != "unused":
                            memory.add(param.grad.untyped_storage()._cdata)
                            param.sub_(param.grad, alpha=0.01)
                if mp_policy == MixedPrecisionPolicy():
                    assert 1 < len(memory) < len([*model.parameters()]) - 1
                model.zero_grad()
    assert device.races == []
    assert recorder.num_checked > 500


@on_fake_ranks(4)
def test_a_partial_in_flight_goes_to_the_replicas_with_the_next_microbatch(monkeypatch):
    comm = StreamCommunicator(FakeDevice())
    insides.use_communicator(monkeypatch, lambda _: comm)
    model = meshard.fully_shard(nn.Linear(4, 4), init_device_mesh("cpu", (2, 2)))
    with CommLedger(model) as ledger:
        for is_last, sync in ((False, GradientSync.REDUCE_SCATTER), (True, GradientSync.FULL)):
            model.set_is_last_backward(is_last)
            model.set_gradient_sync(sync)
            model(torch.ones(1, 4)).sum().backward()
    ops = [event.op for event in ledger.events if event.op != "all_gather"]
    assert ops == ["reduce_scatter", "reduce_scatter", "all_reduce"]
