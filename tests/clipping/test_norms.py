"""Norms and clipping, against those of unsharded gradients."""

import copy
import math
import os
import re
import sys
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import GradientSync
from tests.support import strategies
from tests.support.models import Made, MlpStack, Table, UnevenMlp, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_ranks, on_threads
from tests.support.sharding import shard_blocks
from tests.support.threads import run_threads

NORMS = [2, 0.5, 1, 3, math.inf]


def make():
    """Return units on two meshes, a parameter that stays plain, and shards that are empty."""
    members = {"stack": MlpStack(), "uneven": UnevenMlp(), "plain": nn.Parameter(torch.empty(3))}
    model = seeded(
        Made(
            lambda m, x, y: m.stack(x).square().mean() + m.uneven(y).mean() + m.plain.sum(),
            **members,
        )
    )
    plain = copy.deepcopy(model)
    shard_blocks(model.stack, init_device_mesh("cpu", (2, 2)))
    flat = init_device_mesh("cpu", (4,))
    meshard.fully_shard(model.uneven, flat, ignored_params={model.plain})
    for each in (model, plain):
        each(torch.ones(3, 6), torch.ones(3, 7)).backward()  # the same on all ranks
    return model, plain


@on_ranks(4)
def test_norms_and_clipping_over_mixed_meshes_are_those_of_unsharded_gradients():
    for norm_type, max_norm in zip(NORMS, [0.1, 0.1, 1e6, 1e6, 0.1], strict=True):
        model, plain = make()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
        found = meshard.get_total_norm([p.grad for p in model.parameters()], norm_type)
        assert type(found) is torch.Tensor
        assert_same(found, expected, what=f"{norm_type}-norm")
        assert_same(meshard.clip_grad_norm_(model, max_norm, norm_type), expected)
        assert_same(full_grads(model), full_grads(plain), what=f"clipped by {norm_type}-norm")


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
@on_threads(4)
def test_tied_and_replicated_parameters_count_once_beside_sharded_ones(mesh_shape):
    plain = Made(
        lambda m, x: m.head(m.middle(m.first(x))),
        first=nn.Linear(4, 4, bias=False),
        middle=nn.Linear(4, 4),
        head=nn.Linear(4, 4, bias=False),
    )
    plain.head.weight = plain.first.weight
    model, x = copy.deepcopy(seeded(plain)), torch.ones(2, 4)
    meshard.replicate(model.middle, init_device_mesh("cpu", (4,)))
    meshard.fully_shard(model, init_device_mesh("cpu", mesh_shape))
    for each in (model, plain):
        each(x).square().sum().backward()
    for norm_type in NORMS:
        expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()], norm_type)
        assert_same(meshard.clip_grad_norm_(model, 1e6, norm_type), expected)


def norm_of_gradients(mesh_shape, grads, dtypes, norm_type, max_norm):
    """Every rank has the same gradients; the last parameter is not sharded."""
    model = Table([grad.shape for grad in grads], dtypes)
    mesh = init_device_mesh("cpu", mesh_shape)
    meshard.fully_shard(model, mesh, ignored_params={model.params[-1]})
    model(torch.zeros(()), grads).backward()
    norm = meshard.clip_grad_norm_(model, max_norm, norm_type)
    after = meshard.get_total_norm([param.grad for param in model.parameters()], norm_type)
    return norm, after, full_grads(model)


@given(
    mesh=strategies.meshes(),
    shapes=st.lists(strategies.param_shapes(), min_size=1, max_size=3),
    narrow=st.booleans(),
    norm_type=st.sampled_from(NORMS),
    max_norm=st.sampled_from([0.5, 1e6]),
)
def test_norms_of_any_shapes_are_those_of_unsharded_gradients(
    mesh, shapes, narrow, norm_type, max_norm
):
    shapes = [*shapes, (3, 2)]
    dtypes = [torch.float64] * len(shapes)
    if narrow:
        dtypes[0] = dtypes[-1] = torch.float32
    coarsest = torch.float32 if narrow else torch.float64
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    args = (mesh, whole, dtypes, norm_type, max_norm)
    results = run_threads(norm_of_gradients, math.prod(mesh), *args)
    flat = torch.cat([gradient.flatten() for gradient in whole])
    expected = torch.linalg.vector_norm(flat, norm_type)
    scale = min(1.0, max_norm / (expected.item() + 1e-6))
    for norm, after, grads in results:
        assert torch.equal(norm, results[0][0])  # ranks clip alike, to the bit
        assert norm.dtype == torch.float64 or narrow
        assert_same(norm.double(), expected, coarsest)
        assert_same(after.double(), expected * scale, coarsest)
        for gradient, found in zip(whole, grads.values(), strict=True):
            if found is not None:  # of an empty parameter there may be none
                assert_same(found.double(), gradient * scale, coarsest)


@on_threads(4)
def test_bad_norms_are_refused():
    model, _ = make()
    assert meshard.get_total_norm([]).item() == 0
    before = full_grads(model)
    if dist.get_rank() == 0:
        model.uneven.layers[0].weight.grad.to_local().fill_(math.inf)
    with pytest.raises(RuntimeError, match=r"2.0-norm of the gradients is inf"):
        meshard.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert_same(model.plain.grad, before["plain"], bitwise=True)
    model.stack.set_gradient_sync(GradientSync.NONE)
    model(torch.ones(3, 6), torch.ones(3, 7)).backward()
    with pytest.raises(RuntimeError, match=r"holds gradients that are not reduced yet"):
        meshard.clip_grad_norm_(model, 1.0)


def with_head(ignores_head=False):
    """Return a model whose root was forgotten: nothing shards ``head``."""
    body, head, frozen = (nn.Linear(4, 4) for _ in range(3))
    frozen.requires_grad_(False)
    model = Made(lambda m, x: m.head(m.body(x)), body=body, head=head, frozen=frozen)
    ignored = set(head.parameters()) if ignores_head else None
    meshard.fully_shard(seeded(model).body, ignored_params=ignored)
    return model


def strays(how):
    """Return the warnings of clipping and of two steps."""
    model = with_head(ignores_head=how == "ignored")
    params = model.named_parameters() if how == "named" else model.parameters()
    optimizer = torch.optim.SGD(params, lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            if how == "clip":
                meshard.clip_grad_norm_(model, 1.0)
            optimizer.step()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("how", ["clip", "step", "named", "ignored"])
@on_ranks(2)
def test_parameters_in_no_unit_are_warned_about_once(how):
    told = strays(how)
    assert len(told) == (how != "ignored")
    for text in told:
        happens, remedy = text.split("\n")
        assert happens.startswith("ranks drift apart") and "are in no unit (2 in all)" in happens
        names = (
            "(of shape (4, 4))', '(of shape (4,))" if how == "step" else "head.weight', 'head.bias"
        )
        assert f"'{names}'" in happens
        assert "fully_shard" in remedy and "ignored_params" in remedy and "describe" in remedy


@on_ranks(2)
def test_parameters_in_no_unit_are_an_error_under_debug():
    names = re.escape("'head.weight', 'head.bias' are in no unit")
    with mock.patch.dict(os.environ, MESHARD_DEBUG="1"), pytest.raises(RuntimeError, match=names):
        strays("named")


@on_ranks(2)
def test_a_warning_points_at_the_line_of_the_user():
    model = with_head()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    line = sys._getframe().f_lineno + 2
    with pytest.warns(UserWarning, match="are in no unit") as caught:
        optimizer.step()
    assert [(each.filename, each.lineno) for each in caught] == [(__file__, line)]


@pytest.mark.parametrize("is_inside", [True, False])
@on_ranks(2)
def test_adapters_that_were_added_to_a_frozen_unit_are_warned_about_once(is_inside):
    base = meshard.fully_shard(nn.Linear(4, 4).requires_grad_(False))
    adapter = nn.Linear(4, 2)
    if is_inside:
        base.adapter = adapter
    optimizer = torch.optim.SGD(adapter.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            adapter(base(torch.ones(2, 4))).sum().backward()
            meshard.clip_grad_norm_(adapter, 1.0)
            optimizer.step()
    names = "ranks drift apart: trainable parameters '(of shape (2, 4))', '(of shape (2,))'"
    assert [str(each.message).split(" are in no")[0] for each in caught] == [names] * is_inside


@on_ranks(1)
def test_on_one_rank_parameters_in_no_unit_are_trained_like_the_others():
    assert strays("step") == []


def test_complex_gradients_are_clipped_as_by_torch():
    """Units refuse complex parameters, but those in no unit are clipped with the others."""
    for norm_type in NORMS:
        ours, theirs = (nn.Parameter(torch.ones(3, dtype=torch.complex64)) for _ in range(2))
        for param in (ours, theirs):
            param.grad = torch.tensor([3 + 4j, 1j, 2], dtype=torch.complex64)
        total = meshard.clip_grad_norm_([ours], 1.0, norm_type)
        expected = nn.utils.clip_grad_norm_([theirs], 1.0, norm_type)
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(ours.grad, theirs.grad)
