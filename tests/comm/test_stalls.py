"""Waits that last are reported once: for what, for how long, and which ranks have not come."""

import logging
import os
import re
import tempfile
import threading
import time
from collections import OrderedDict
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from meshard._comm import stalls, streams
from meshard.checkpoint import Checkpointer
from tests.support.fake_device import FakeDevice
from tests.support.models import seeded
from tests.support.ranks import on_ranks
from tests.support.stream_steps import run_steps

SHORT = 0.4  # seconds after which a wait is reported here


@contextmanager
def reports(seconds=SHORT, then=lambda: None):
    """Yield the list of what is reported while the block runs, and call ``then`` each time."""
    found = []

    class Kept(logging.Handler):
        def emit(self, record):
            found.append(record.getMessage())
            then()

    handler, logger = Kept(), logging.getLogger("meshard")
    logger.addHandler(handler)
    try:
        with mock.patch.dict(os.environ, MESHARD_STALL_SECONDS=str(seconds)):
            yield found
    finally:
        logger.removeHandler(handler)


def warm_model(shared_memory="1"):
    """Return a model that has run a step, so that nothing has to be prepared any more."""
    model = meshard.fully_shard(seeded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))
    with mock.patch.dict(os.environ, MESHARD_SHARED_MEMORY=shared_memory):
        model(torch.ones(1, 4)).sum().backward()
    return model


def come_late(rank, seconds=4 * SHORT):
    dist.barrier()
    if dist.get_rank() == rank:
        time.sleep(seconds)


@contextmanager
def reported(*texts, late=1):
    """Let a rank run the block late, which each of the others reports once, with all ``texts``.

    It comes once all others have reported, however slow the machine is.
    """
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    files = [Path(folder[0], str(rank)) for rank in range(dist.get_world_size())]
    own, others = files[dist.get_rank()], [*files[:late], *files[late + 1 :]]
    with reports(then=own.touch) as found:
        dist.barrier()
        deadline = time.monotonic() + 60
        while own is files[late] and not all(each.exists() for each in others):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield found
    assert len(found) == (own is not files[late])
    for report in found:
        assert all(text in report for text in texts), report


@on_ranks(3)
def test_a_wait_names_collective_unit_line_and_the_ranks_that_have_not_come():
    model = warm_model()
    with reported("more batches or microbatches", "MESHARD_STALL_SECONDS", late=2) as found:
        model(torch.ones(1, 4))
    pattern = rf"rank {dist.get_rank()} has waited [\d.]+ s for the all_gather of unit "
    pattern += rf"'\(root\)' \(root \d+\), in {re.escape(__file__)}:\d+: "
    pattern += r"rank 2 has not come\."
    for happens, _ in (text.split("\n") for text in found):
        assert re.fullmatch(pattern, happens), happens


@on_ranks(3)
def test_through_sockets_a_wait_names_the_ranks_of_the_group():
    model = warm_model("0")
    named = "s for the all_gather of unit '(root)'", "not all of ranks 0, 1, 2 have come"
    with reported(*named):
        model(torch.ones(1, 4))


@on_ranks(2)
@pytest.mark.parametrize(
    ("folder", "is_alone"),
    [("site-packages", False), ("dist-packages", False), ("site-packages", True)],
)
def test_the_line_is_that_of_the_user_and_not_of_an_installed_package(is_alone, folder):
    model, library, path = warm_model(), {}, f"/home/user/lib/{folder}/trainer.py"
    exec(compile("def step(model, x):\n    return model(x)", path, "exec"), library)
    with reported(f", in {path if is_alone else __file__}:"):
        if is_alone:  # there the package is all there is
            thread = threading.Thread(target=library["step"], args=(model, torch.ones(1, 4)))
            thread.start()
            thread.join()
        else:
            library["step"](model, torch.ones(1, 4))


@on_ranks(2)
def test_what_prepares_a_first_step_is_named_in_words():
    model = meshard.fully_shard(seeded(nn.Linear(4, 4)))
    with reports() as found:
        come_late(1)
        loss = model(torch.ones(1, 4)).sum()
        come_late(1)
        loss.backward()
        if dist.get_rank() == 0:
            text = "\n".join(found)
            assert "the set-up of shared memory, before the first collective of these" in text
            assert "the comparison of initial values, at the first reduction, in" in text


@on_ranks(2)
def test_a_wait_for_a_collective_that_is_given_up_is_reported_too():
    """After a backward that raised, of which another rank has not started as much yet."""
    layers = [meshard.fully_shard(nn.Linear(4, 4), reshard_after_forward=False) for _ in range(2)]
    model = meshard.fully_shard(nn.Sequential(*layers), reshard_after_forward=False)
    with mock.patch.dict(os.environ, MESHARD_SHARED_MEMORY="0"), reports() as found:
        model(torch.ones(1, 4)).sum().backward()
        layers[0].register_forward_hook(
            lambda *args: args[2].register_hook(lambda _: 1 / 0) and None
        )
        loss = model(torch.ones(1, 4)).sum()
        come_late(1)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        model.reset_iter_state()
        text = "".join(found)
        assert ("of unit '1'" in text) is (dist.get_rank() == 0), text


@pytest.mark.parametrize("shared_memory", ["0", "1"])
@on_ranks(2)
def test_a_reduction_that_waits_is_named_too(shared_memory):
    model = warm_model(shared_memory)
    with reports():  # the seconds are read when a step begins
        loss = model(torch.ones(1, 4)).sum()
    with reported("reduce_scatter of unit '(root)'"):
        loss.backward()


@on_ranks(2)
def test_a_rank_that_alone_asks_for_unsharded_parameters_is_told():
    model = warm_model()
    with reported("of unit '(root)'", __file__), meshard.unsharded_params(model):
        pass


@on_ranks(2)
def test_a_rank_that_alone_saves_is_told(tmp_path):
    model, store = warm_model(), Checkpointer(tmp_path)
    with reported("checkpoint"):
        store.save(1, model)


@on_ranks(2)
def test_each_stall_is_reported_once_and_short_waits_are_not():
    model = warm_model()
    with reports() as found:
        come_late(1, SHORT / 4)
        model(torch.ones(1, 4))
        assert not found
    for _ in range(2):
        with reported():
            model(torch.ones(1, 4))


@on_ranks(2)
def test_zero_seconds_turn_it_off():
    model = warm_model()
    with reports(0) as found:
        come_late(1)
        model(torch.ones(1, 4))
        assert not found


@on_ranks(2)
def test_a_number_of_seconds_that_is_none_is_refused_by_name():
    with reports("soon"), pytest.raises(ValueError, match="MESHARD_STALL_SECONDS must be a number"):
        warm_model()


def event(*, is_over=False):
    return mock.Mock(**{"query.return_value": is_over})


@pytest.fixture
def look():
    """Return what the thread calls, with a list of handles in which there are no others."""
    with mock.patch.multiple(stalls, _handles=OrderedDict(), _moved_at=0.0, _thread="none"):
        yield stalls._look


DEVICE = FakeDevice()


def queue(*events, device=DEVICE):
    for number, each in enumerate(events):
        what = "all_gather", "abcdefghi"[number]
        stalls.watch_event(each, what, owner=device, device_module=device)


def test_a_collective_that_a_device_does_not_finish_is_reported_once(look):
    with reports(10) as found:
        over, stuck, later = event(), event(), event()
        queue(over, stuck, later)
        now, over.query.return_value = time.monotonic(), True
        look(now + 9, 10)
        look(now + 11, 10)  # the first one has ended in between
        assert not found
        look(now + 22, 10)
        (text,) = found
        assert "waits for the all_gather of unit 'b', which its device has not finished 22" in text
        look(now + 33, 10)
        assert len(found) == 1


def test_what_a_model_that_is_gone_has_queued_is_not_reported(look):
    class Owner:
        pass

    owner = Owner()
    with reports(10) as found:
        stalls.watch_event(event(), ("all_gather", "a"), owner=owner, device_module=DEVICE)
        del owner
        look(time.monotonic() + 100, 10)
    assert not found and not stalls._handles


def test_a_device_that_goes_on_is_not_reported(look):
    with reports(10) as found:
        events = [event() for _ in range(9)]
        queue(*events)
        now = time.monotonic()
        for seconds, each in enumerate(events):
            each.query.return_value = True
            look(now + 8 * seconds, 10)
        assert not found


def test_no_event_is_queried_while_a_graph_is_captured(look):
    """Any query would spoil the capture, even one of an event that was recorded before it."""
    device, before, captured = FakeDevice(), event(), event()
    with reports(10):
        device.is_current_stream_capturing = lambda: False
        queue(before, device=device)
        look(time.monotonic() + 9, 10)  # the capture may have begun
        device.is_current_stream_capturing = lambda: True
        queue(captured, device=device)
        look(time.monotonic() + 100, 10)
    assert not before.query.called
    assert not captured.query.called


def test_the_list_does_not_grow_and_forgets_what_is_done(look):
    events = [event(is_over=True) for _ in range(stalls._MOST + 5)]
    for each in events:
        queue(each)
    assert len(stalls._handles) == stalls._MOST
    look(time.monotonic() + 100, 10)
    assert not stalls._handles


def test_steps_on_streams_are_watched(monkeypatch):
    added = []
    monkeypatch.setattr(streams, "watch_event", lambda event, what, **_: added.append(what))
    run_steps(monkeypatch, (2, 2))
    assert {op for op, _ in added} == {"all_gather", "reduce_scatter", "all_reduce"}
