"""Replicated modules: windows, steps and edits in random orders.

The oracle is a table: what is in ``.grad``, and what a window has beside it, in integers.
"""

import random
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import meshard
from meshard import GradientSync
from meshard._comm import gradient_buffer
from tests.support.models import Table
from tests.support.spread import spread

SHAPES = [(3,), (2, 2), (), (5,), (4, 1), (1,), (2, 3)]


class Play:
    """One module, and what its gradients should be.

    Args:
        seed: Of all that is chosen; the same on all ranks.
        dtypes: Of its parameters.
        **kwargs: Of ``replicate``.
    """

    def __init__(self, seed, dtypes, **kwargs):
        self.choose = random.Random(seed)
        self.model = Table(SHAPES, dtypes)
        self.params = list(self.model.params)
        meshard.replicate(self.model, bucket_cap_mb=self.choose.choice([25, 3e-5]), **kwargs)
        self.model.set_gradient_divide_factor(1.0)
        self.optimizer = torch.optim.SGD(self.params, lr=0.0)
        self.shown = [None] * len(SHAPES)
        self.pending = [None] * len(SHAPES)
        self.story = []

    def gradients(self, rank):
        """Integers, or None, for each parameter."""
        drawn = []
        for param in self.params:
            value = self.choose.choice([None, 1, 2, -3])
            mask = torch.arange(param.numel()).view(param.shape).to(param.dtype) % 2
            drawn.append(None if value is None else value + mask)
        return drawn

    def backward(self):
        mode = self.choose.choice(list(GradientSync))
        of_ranks = [self.gradients(rank) for rank in range(dist.get_world_size())]
        for number, param in enumerate(self.params):
            if not param.requires_grad:
                continue
            for drawn in of_ranks:
                self._add(self.pending, number, drawn[number])
        if mode is GradientSync.FULL:
            self._flush()
        with meshard.gradient_sync(self.model, mode):
            x = torch.zeros((), requires_grad=True)
            self.model(x, of_ranks[dist.get_rank()]).backward()
        self.story.append(mode.name)

    @staticmethod
    def _add(into, number, what):
        if what is not None:
            into[number] = what.clone() if into[number] is None else into[number] + what

    def _flush(self):
        for number, what in enumerate(self.pending):
            self._add(self.shown, number, what)
        self.pending = [None] * len(SHAPES)

    def finalize(self):
        meshard.finalize_gradients(self.model)
        self._flush()

    def zero_grad(self):
        to_none = self.choose.random() < 0.5
        self.choose.choice([self.model, self.optimizer]).zero_grad(set_to_none=to_none)
        self.shown = [None if to_none or x is None else torch.zeros_like(x) for x in self.shown]
        self.pending = [None] * len(SHAPES)

    def edit(self):
        number = self.choose.randrange(len(SHAPES))
        param, old = self.params[number], self.shown[number]
        how = self.choose.choice(["drop", "double", "replace", "alias", "own"])
        self.story[-1] += f" {how} {number}"
        if how == "drop":
            param.grad = self.shown[number] = None
        elif how == "own":
            param.grad = torch.ones_like(param)
            self.shown[number] = torch.ones_like(param.detach())
        elif old is not None and how == "double":
            param.grad.mul_(2)
            self.shown[number] = old * 2
        elif old is not None and how == "replace":
            param.grad = param.grad * 2
            self.shown[number] = old * 2
        elif old is not None:
            param.grad = param.grad.detach()

    def freeze(self):
        if all(x is None for x in self.pending):
            for param in self.params:
                param.requires_grad_(self.choose.random() < 0.7)

    def evaluate(self):
        if dist.get_rank() == self.choose.randrange(2):
            with torch.no_grad():
                self.model(torch.zeros(()), [None] * len(SHAPES))

    def fail(self):
        x = torch.zeros((), requires_grad=True)
        out = self.model(x, self.gradients(0))
        out.register_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            (out * 1).backward()
        self.model.reset_iter_state()
        self.shown, self.pending = [None] * len(SHAPES), [None] * len(SHAPES)

    def run(self, length):
        doings = [*[self.backward] * 6, self.finalize, self.zero_grad, self.edit, self.edit]
        doings += [self.freeze, self.evaluate, self.fail]
        for _ in range(length):
            doing = self.choose.choice(doings)
            self.story.append(doing.__name__)
            try:
                doing()
            except RuntimeError as error:
                raise AssertionError(f"after {self.story}") from error
            self.check()

    def check(self):
        for number, (param, wanted) in enumerate(zip(self.params, self.shown, strict=True)):
            found = param.grad
            is_same = (
                found is wanted
                if found is None or wanted is None
                else (torch.equal(found, wanted) and found.dtype == param.dtype)
            )
            assert is_same, f"{number}: {found}, not {wanted}, after {self.story}"


def _raise(_):
    raise ZeroDivisionError


def play(first, dtypes, kwargs, count=25):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was replaced by another tensor")
        for seed in range(first, first + count):
            Play(seed, dtypes, **kwargs).run(25)


DTYPES = {
    "float32": [torch.float32] * 7,
    "mixed": [torch.float32, torch.bfloat16, torch.float64, torch.bfloat16, *[torch.float32] * 3],
}


@spread(dtypes=[*DTYPES], as_views=[True, False])
def test_any_order_of_doings(run_ranks, dtypes, as_views):
    run_ranks(play, 2, 0, DTYPES[dtypes], {"gradient_as_bucket_view": as_views}, timeout=200)


def play_packing_early(first, dtypes, kwargs):
    with mock.patch.object(gradient_buffer, "_LARGE", 1):
        play(first, dtypes, kwargs)


@pytest.mark.slow
@spread(dtypes=[*DTYPES], as_views=[True, False])
def test_any_order_where_gradients_are_packed_as_they_arrive(run_ranks, dtypes, as_views):
    kwargs = {"gradient_as_bucket_view": as_views}
    run_ranks(play_packing_early, 2, 200, DTYPES[dtypes], kwargs, timeout=200)


@pytest.mark.slow
def test_any_order_of_doings_with_copies_for_compute(run_ranks):
    policy = meshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    run_ranks(play, 2, 100, DTYPES["float32"], {"mp_policy": policy}, timeout=200)
