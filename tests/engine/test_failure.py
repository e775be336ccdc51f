"""How the next use of a model notices that a backward was cut off: ``Failure``."""

import threading
import weakref

import pytest
import torch

from meshard._engine.unit import Failure
from tests.support import insides
from tests.support.models import MlpStack, seeded
from tests.support.ranks import fake_group
from tests.support.sharding import shard_blocks


def callback():
    return lambda: None


def begun():
    """Return the failure of a backward that has begun on this thread, and autograd's callback."""
    failure, end = Failure(), callback()
    failure.thread, failure.end = threading.get_ident(), weakref.ref(end)
    return failure, end


def in_backward(ask):
    answers = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: answers.append(ask()))
    x.sum().backward()
    return answers.pop()


def on_another_thread(ask):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    thread.join()
    return answers.pop()


def test_a_backward_that_runs_has_not_failed():
    failure, end = begun()
    assert not in_backward(failure.has_happened)
    assert not on_another_thread(failure.has_happened)  # as one of autograd for a device
    failure.end = None  # the callback has run
    assert not failure.has_happened()
    assert end is not None


def test_a_backward_whose_callback_was_dropped_has_failed_whoever_asks():
    for ask in (in_backward, on_another_thread, lambda ask: ask()):
        failure, end = begun()
        del end
        assert ask(failure.has_happened)


def test_a_callback_that_is_dropped_late_is_of_a_failed_backward_once_its_thread_is_outside():
    failure, end = begun()
    assert not on_another_thread(failure.has_happened)  # it cannot tell yet
    assert failure.has_happened()
    assert in_backward(failure.has_happened)  # until someone cleans up
    assert on_another_thread(failure.has_happened)
    del end


def test_an_error_while_gradients_are_finished_is_a_failure():
    failure = Failure()
    with failure.recorded():
        pass
    assert not failure.has_happened()
    with pytest.raises(KeyboardInterrupt), failure.recorded():
        raise KeyboardInterrupt
    assert failure.has_happened()


USES = {
    "forward": lambda model: model(torch.ones(2, 6)).sum().backward(),
    "state_dict": lambda model: model.state_dict(),
    "reset_iter_state": lambda model: model.reset_iter_state(),
}


@pytest.mark.parametrize("use", USES)
def test_the_next_use_cleans_up_before_a_device_thread_drops_the_callback(monkeypatch, use):
    def fail(*_):
        raise ZeroDivisionError

    def fail_in_backward(module, args, output):
        output.register_hook(fail)

    kept = insides.keep_backward_callbacks(monkeypatch)
    with fake_group(1):
        model = shard_blocks(seeded(MlpStack()))
        handle = model.blocks[0].up.register_forward_hook(fail_in_backward)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 6)).sum().backward()
        handle.remove()
        assert insides.leases(model.blocks[0]) == ("BACKWARD", "installed")
        USES[use](model)
        assert insides.leases(model.blocks[0]) == ("", "sharded") and kept
        kept.clear()  # what comes late changes nothing
        model(torch.ones(2, 6)).sum().backward()
        assert insides.unsharded_units(model) == []
