"""Comparison of a sharded model with the plain one on the whole batch."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

# (relative, absolute), for sums of a few hundred products that were added in another order.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-12, 1e-13),
    torch.float32: (1e-5, 1e-6),
    torch.float16: (4e-3, 1e-3),
    torch.bfloat16: (3e-2, 1e-2),
}

Values = torch.Tensor | float | None | Mapping[str, Any]


def assert_same(
    actual: Values,
    expected: Values,
    dtype: torch.dtype = torch.float32,
    *,
    bitwise: bool = False,
    what: str = "value",
) -> None:
    """Compare tensors, numbers, None, or mappings of them by name.

    Args:
        actual: What was computed, as plain tensors.
        expected: What the oracle says.
        dtype: The coarsest dtype on the way; chooses the tolerance.
        bitwise: Allow no difference but that between 0.0 and -0.0.
        what: Begins the text of an error.
    """
    if isinstance(expected, Mapping):
        assert isinstance(actual, Mapping), f"{what}: {type(actual).__name__} is no mapping"
        assert list(actual) == list(expected), (
            f"{what}: names differ: {sorted(set(actual) ^ set(expected)) or 'in order only'}"
        )
        for name, value in expected.items():
            assert_same(actual[name], value, dtype, bitwise=bitwise, what=f"{what} {name!r}")
        return
    if expected is None or actual is None:
        assert expected is actual, f"{what}: {actual} is not {expected}"
        return
    if _is_equal(actual, expected):
        return
    relative, absolute = (0.0, 0.0) if bitwise else TOLERANCES[dtype]
    torch.testing.assert_close(
        actual,
        expected,
        rtol=relative,
        atol=absolute,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


def _is_equal(one: Any, other: Any) -> bool:
    """Tell a comparison of torch.testing, which is slow, that it may be left out."""
    if not isinstance(one, torch.Tensor) or type(one) is not type(other):
        return False
    alike = (one.dtype, one.device, one.layout) == (other.dtype, other.device, other.layout)
    return alike and torch.equal(one, other)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain copy of all of ``tensor``. Collective if it is a DTensor."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    # By way of the host: on gloo, full_tensor() of a CUDA tensor crashes (pytorch/pytorch#152645).
    return tensor.cpu().full_tensor().to(tensor.device, copy=True)


def full_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers whole, by name. Collective if they are sharded."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: whole(tensor) for name, tensor in named}


def full_grads(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return all gradients whole, by parameter name. Collective if they are sharded."""
    return {
        name: None if param.grad is None else whole(param.grad)
        for name, param in module.named_parameters()
    }


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of this rank's part of ``tensor``. Sends nothing."""
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def own_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's part of all parameters and buffers, by name.

    Enough, and much faster than ``full_state``, where two models are cut alike.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: own_part(tensor) for name, tensor in named}


def own_grads(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return this rank's part of all gradients, by parameter name."""
    return {
        name: None if param.grad is None else own_part(param.grad)
        for name, param in module.named_parameters()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a training step left: taken after backward (``grads``) and after the update."""

    loss: float  # of the whole batch
    grads: dict[str, torch.Tensor | None]
    params: dict[str, torch.Tensor]


OptimizerFn = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
LossFn = Callable[[torch.Tensor], torch.Tensor]


def train(
    model: nn.Module,
    batches: Sequence[torch.Tensor],
    optimizer_fn: OptimizerFn,
    *,
    loss_fn: LossFn,
    steps: int | None = None,
    reduce_loss: str | None = None,
) -> list[Step]:
    """Train ``model``, sharded or plain, one optimizer step per batch.

    Args:
        model: Changed in place.
        batches: This rank's inputs; begun again when they are used up.
        optimizer_fn: Takes the trainable parameters.
        loss_fn: Of the model's output.
        steps: Defaults to the number of batches.
        reduce_loss: ``"mean"`` or ``"sum"`` over all ranks, or None for this rank's own loss.
    """
    optimizer = optimizer_fn([param for param in model.parameters() if param.requires_grad])
    records = []
    for step in range(len(batches) if steps is None else steps):
        loss = loss_fn(model(batches[step % len(batches)]))
        loss.backward()
        total = loss.detach().clone()
        if reduce_loss is not None:
            dist.all_reduce(total)
            total /= dist.get_world_size() if reduce_loss == "mean" else 1
        grads = full_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        records.append(Step(loss=total.item(), grads=grads, params=full_state(model)))
    return records


def train_plain(
    model: nn.Module,
    batches: Sequence[torch.Tensor],
    optimizer_fn: OptimizerFn,
    steps: int | None = None,
    *,
    loss_fn: LossFn,
) -> list[Step]:
    """Train a copy of the plain ``model`` on whole batches: the oracle of a sharded run."""
    return train(copy.deepcopy(model), batches, optimizer_fn, loss_fn=loss_fn, steps=steps)


def assert_same_run(
    actual: Sequence[Step],
    expected: Sequence[Step],
    dtype: torch.dtype = torch.float32,
    *,
    bitwise: bool = False,
) -> None:
    """Compare every loss, gradient and parameter after every step."""
    assert len(actual) == len(expected), f"{len(actual)} steps are not {len(expected)}"
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        for kind in ("loss", "grads", "params"):
            assert_same(
                getattr(one, kind),
                getattr(other, kind),
                dtype,
                bitwise=bitwise,
                what=f"step {number}: {kind}",
            )
