"""Gradient hooks without a handle, against those with one."""

import copy
import weakref

import pytest
import torch

from meshard._torch.private import hook_gradient

OTHER = type("Other", (torch.Tensor,), {})


@pytest.mark.parametrize("kind", ["leaf", "made", "view", "subclass"])
def test_beside_hooks_of_users(kind):
    leaf = torch.ones(2, 2, requires_grad=True)
    if kind == "subclass":
        leaf = torch.ones(2, 2).as_subclass(OTHER).requires_grad_()
    tensor = {"leaf": leaf, "view": leaf.t()}.get(kind, leaf * 1)
    seen = []
    first = tensor.register_hook(lambda grad: seen.append("first"))
    hook_gradient(tensor, lambda grad: seen.append("ours") or grad * 2)
    hook_gradient(tensor, lambda grad: seen.append("ours too"))
    last = tensor.register_hook(lambda grad: seen.append(("last", grad.sum().item())))
    (tensor * 1).sum().backward(retain_graph=True)
    assert seen == ["first", "ours", "ours too", ("last", 8.0)]
    assert torch.equal(leaf.grad, torch.full((2, 2), 2.0))
    seen.clear()
    first.remove()
    last.remove()
    (tensor * 1).sum().backward()
    assert seen == ["ours", "ours too"]


def test_a_tensor_changed_in_place_afterwards():
    results = []
    for hook in (torch.Tensor.register_hook, hook_gradient):
        seen, leaf = [], torch.ones(2, requires_grad=True)
        made = leaf * 3
        hook(made, lambda grad, seen=seen: seen.append(grad.clone()))
        made.mul_(2)
        made.sum().backward()
        results.append((len(seen), [each.tolist() for each in seen], leaf.grad.tolist()))
    assert results[0] == results[1] and results[0][0] == 1


def test_it_goes_with_the_tensor():
    class Hook:
        def __call__(self, grad):
            return None

    gone = []
    hook = Hook()
    made = torch.ones(2, requires_grad=True) * 1
    ref = weakref.ref(hook, gone.append)
    hook_gradient(made, hook)
    del hook
    assert ref() is not None and not gone
    del made
    assert gone


def test_a_leaf_can_still_be_copied():
    leaf = torch.ones(2, requires_grad=True)
    hook_gradient(leaf, abs)
    assert torch.equal(copy.deepcopy(leaf), leaf)
