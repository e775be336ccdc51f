"""Use ``assert_same`` to compare values, and ``full_grads`` and so on to get those of a model."""

from collections.abc import Callable, Mapping, Sequence
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


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of this rank's part of ``tensor``. Sends nothing."""
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def full_state(module: nn.Module, part: Callable[..., torch.Tensor] = whole) -> dict[str, Any]:
    """Return all parameters and buffers whole, by name. Collective if they are sharded."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: part(tensor) for name, tensor in named}


def full_grads(module: nn.Module, part: Callable[..., torch.Tensor] = whole) -> dict[str, Any]:
    """Return all gradients whole, by parameter name. Collective if they are sharded."""
    named = [(name, param.grad) for name, param in module.named_parameters()]
    return {name: None if grad is None else part(grad) for name, grad in named}


def own_state(module: nn.Module) -> dict[str, Any]:
    """Return this rank's part of all parameters and buffers, by name.

    Enough, and much faster than ``full_state``, where two models are cut alike.
    """
    return full_state(module, own_part)


def own_grads(module: nn.Module) -> dict[str, Any]:
    """Return this rank's part of all gradients, by parameter name."""
    return full_grads(module, own_part)


def train(
    model: nn.Module,
    batches: Sequence[torch.Tensor],
    optimizer_fn: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    *,
    loss_fn: Callable[[torch.Tensor], torch.Tensor],
    reduce_loss: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Train ``model``, sharded or plain, one optimizer step per batch.

    The oracle of a sharded run is that of a plain model on whole batches.

    Args:
        model: Changed in place.
        batches: This rank's inputs.
        optimizer_fn: Takes the trainable parameters.
        loss_fn: Of the model's output.
        reduce_loss: ``"mean"`` or ``"sum"`` over all ranks, or None for this rank's own loss.

    Returns:
        By ``"step 0"`` and so on the loss, the gradients, and the parameters after the update.
    """
    optimizer = optimizer_fn([param for param in model.parameters() if param.requires_grad])
    steps = {}
    for number, batch in enumerate(batches):
        loss = loss_fn(model(batch))
        loss.backward()
        total = loss.detach().clone()
        if reduce_loss is not None:
            dist.all_reduce(total)
            total /= dist.get_world_size() if reduce_loss == "mean" else 1
        grads = full_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        steps[f"step {number}"] = {
            "loss": total.item(),
            "grads": grads,
            "params": full_state(model),
        }
    return steps
