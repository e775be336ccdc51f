"""Saves in the background."""

import gc
import threading
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from meshard.checkpoint import Checkpointer, CheckpointError
from tests.checkpoint.runs import assert_same_values, net, train, values_of
from tests.support.models import seeded
from tests.support.ranks import on_ranks, on_threads


@pytest.mark.parametrize("layout", ["fully_shard", "replicate"])
@on_ranks(2)
def test_what_is_saved_is_the_state_at_the_call(tmp_path, layout):
    model = net(layout)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = Checkpointer(tmp_path, keep=None)
    states = []
    for step in range(3):
        train(model, optimizer, 1)
        states.append(values_of(model, optimizer))
        checkpointer.async_save(step, model, optimizer)
        train(model, optimizer, 2)
    checkpointer.wait()
    assert checkpointer.steps() == [0, 1, 2]
    for step, expected in enumerate(states):
        checkpointer.load(model, optimizer, step=step)
        assert_same_values(values_of(model, optimizer), expected)


@on_ranks(2)
def test_what_is_refused_is_raised_at_once_and_what_went_wrong_by_wait_and_the_next_call(tmp_path):
    checkpointer, rank, model = Checkpointer(tmp_path), dist.get_rank(), seeded(nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match=r"rank 1: TypeError: the value at \['extra'\] is a"):
        checkpointer.async_save(1, model, extra=object() if rank else 1)
    create = checkpointer._storage.create

    def fail(path):
        raise OSError(28, "No space left on device")

    checkpointer._storage.create = fail if rank else create
    handle = checkpointer.async_save(1, model)
    with pytest.raises(CheckpointError, match=r"rank 1: no space is left"):
        handle.wait()
    assert handle.done()
    checkpointer._storage.create = create
    checkpointer.save(2, model)  # goes on: the error was raised
    checkpointer._storage.create = fail if rank else create
    checkpointer.async_save(3, model)
    with pytest.raises(CheckpointError, match="rank 1"):
        checkpointer.save(4, model)
    checkpointer._storage.create = create
    checkpointer.save(4, model)
    assert checkpointer.steps() == [2, 4]


@on_ranks(2)
def test_only_what_a_rank_writes_is_copied(tmp_path):
    """And, of ordinary tensors, what it compares with those of the other ranks."""
    model = meshard.fully_shard(nn.Linear(256, 256, bias=False))
    checkpointer, plain = Checkpointer(tmp_path), seeded(nn.Linear(60, 60, bias=False))
    checkpointer.async_save(1, model, extra=plain).wait()
    copied = sum(each.nbytes for each in checkpointer._staging._buffers)
    assert copied == model.weight.to_local().nbytes + plain.weight.nbytes


@on_ranks(2)
def test_a_model_that_was_saved_can_be_freed(tmp_path):
    checkpointer, model = Checkpointer(tmp_path), net("fully_shard")
    checkpointer.async_save(1, model).wait()
    alive = weakref.ref(model.layers[0].weight)
    del model
    gc.collect()
    assert alive() is None


@on_ranks(2)
def test_one_save_runs_at_a_time(tmp_path):
    checkpointer, may_go_on = Checkpointer(tmp_path), threading.Event()
    publish = checkpointer._storage.publish

    def wait_and_publish(*args):
        assert may_go_on.wait(30)
        publish(*args)

    checkpointer._storage.publish = wait_and_publish
    first = checkpointer.async_save(1, seeded(nn.Linear(1, 1)))
    assert not first.done()
    assert checkpointer.latest_step() is None
    may_go_on.set()
    checkpointer.async_save(2, seeded(nn.Linear(1, 1))).wait()
    assert first.done()
    assert checkpointer.steps() == [1, 2]


def test_a_save_whose_wait_is_interrupted_runs_to_its_end_before_the_next(tmp_path, monkeypatch):
    checkpointer, may_go_on = Checkpointer(tmp_path), threading.Event()
    create = checkpointer._storage.create

    def wait_and_create(path):
        assert may_go_on.wait(30)
        return create(path)

    checkpointer._storage.create = wait_and_create
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1)
    first = checkpointer.async_save(1, model)
    with monkeypatch.context() as context:
        context.setattr(first, "wait", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            checkpointer.wait()
    nn.init.constant_(model.weight, 2)
    timer = threading.Timer(0.05, may_go_on.set)
    timer.start()
    checkpointer.save(2, model)
    assert first.done() and checkpointer.steps() == [1, 2]
    checkpointer.load(model, step=1)
    assert model.weight.item() == 1


@on_threads(2)
def test_ranks_plan_anew_after_one_was_interrupted_while_it_got_the_plan(tmp_path, monkeypatch):
    checkpointer, rank = Checkpointer(tmp_path), dist.get_rank()
    model = nn.Linear(1, 1)
    for param in model.parameters():
        nn.init.ones_(param)
    checkpointer.save(1, model, position=0)
    checkpointer._storage.create = mock.Mock(side_effect=OSError)
    saver = checkpointer._saver
    plan = saver._plan
    with pytest.raises(CheckpointError):
        checkpointer.save(2, model, position=rank)
    del checkpointer._storage.create
    if rank:
        saver._plan = plan  # as after an interrupt
    checkpointer.save(3, model, position=rank)
    assert checkpointer.load(model).extra == {"position": rank}


def test_a_warning_that_is_an_error_does_not_fail_a_save_that_is_committed(tmp_path, capsys):
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, nn.Linear(1, 1))
    checkpointer._storage.remove_file = mock.Mock(side_effect=OSError("busy"))
    checkpointer.async_save(2, nn.Linear(1, 1)).wait()  # pytest makes warnings errors
    assert checkpointer.steps() == [1, 2]
    assert "could not be removed: busy; the next save tries" in capsys.readouterr().err
