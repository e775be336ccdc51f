"""How a backward that has raised is told from one that runs."""

import threading

import torch

from meshard._torch.private import BackwardCall


def test_the_call_of_a_backward_is_found_from_another_thread():
    calls = []

    def find_in_a_thread(gradient):
        thread = threading.Thread(target=lambda: calls.append(BackwardCall()))
        thread.start()
        thread.join()
        calls.append(BackwardCall())
        assert not any(call.has_returned() for call in calls)

    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(find_in_a_thread)
    (leaf * 2).backward()
    assert len(calls) == 2 and all(call.has_returned() for call in calls)
    assert not BackwardCall().has_returned()  # outside of a backward nothing is known
