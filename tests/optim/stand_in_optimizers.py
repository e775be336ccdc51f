"""Stand-ins for optimizers that are not in torch: what each does to a tensor, and no more.

They read parameters, make their states and write to their param groups as the original does, since
that is what decides whether it works on shards. None is meant to train anything.
"""

import torch
from torch.distributed.tensor import DTensor


class StandIn(torch.optim.Optimizer):
    """An optimizer that steps one parameter after another by ``step_one``."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.step_one(group, param, param.grad, self.state[param])


class Lion(StandIn):
    """The sign of a momentum (Chen et al., 2023): pointwise."""

    def step_one(self, group, param, grad, state):
        momentum = state.setdefault("exp_avg", torch.zeros_like(param))
        param.mul_(1 - group["lr"] * 0.1)
        param.add_(momentum.lerp(grad, 0.1).sign_(), alpha=-group["lr"])
        momentum.lerp_(grad, 0.01)


class Lamb(StandIn):
    """Adam, scaled by the norms of the parameter and of the update (You et al., 2019)."""

    def step_one(self, group, param, grad, state):
        average = state.setdefault("exp_avg", torch.zeros_like(param))
        square = state.setdefault("exp_avg_sq", torch.zeros_like(param))
        average.mul_(0.9).add_(grad, alpha=0.1)
        square.mul_(0.999).addcmul_(grad, grad, value=0.001)
        update = average / square.sqrt().add(1e-6)
        norm = param.pow(2).sum().sqrt().clamp(0, 10)
        update_norm = update.pow(2).sum().sqrt()
        ratio = 1.0 if norm == 0 or update_norm == 0 else norm / update_norm
        param.add_(update, alpha=-group["lr"] * ratio)


class Lars(StandIn):
    """Momentum, scaled by norms that are read as numbers (You et al., 2017)."""

    def step_one(self, group, param, grad, state):
        norm, grad_norm = param.norm().item(), grad.norm().item()
        ratio = 0.02 * norm / (grad_norm + 1e-8) if norm and grad_norm else 1.0
        momentum = state.setdefault("momentum_buffer", torch.zeros_like(param))
        momentum.mul_(0.9).add_(grad, alpha=ratio)
        param.sub_(momentum)


class Shampoo(StandIn):
    """A preconditioner for each dim of a tensor (Gupta et al., 2018), by eigenvalues."""

    def step_one(self, group, param, grad, state):
        for dim, size in enumerate(param.shape):
            rows = grad.transpose(0, dim).reshape(size, -1)
            factor = state.setdefault(dim, 1e-4 * torch.eye(size))
            factor.add_(rows @ rows.T)
            values, vectors = torch.linalg.eigh(factor)
            root = vectors @ torch.diag(values.clamp(min=1e-8) ** (-0.5 / param.dim())) @ vectors.T
            grad = (root @ rows).reshape(grad.transpose(0, dim).shape).transpose(0, dim)
        param.sub_(grad, alpha=group["lr"])


class TransformersAdafactor(StandIn):
    """Adafactor of Hugging Face's transformers, whose factors are plain tensors."""

    def step_one(self, group, param, grad, state):
        update = grad**2 + 1e-30
        if param.dim() > 1:
            if not state:
                state["exp_avg_sq_row"] = torch.zeros(grad.shape[:-1]).to(grad)
                state["exp_avg_sq_col"] = torch.zeros(grad.shape[:-2] + grad.shape[-1:]).to(grad)
            row, col = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
            row.mul_(0.5).add_(update.mean(dim=-1), alpha=0.5)
            col.mul_(0.5).add_(update.mean(dim=-2), alpha=0.5)
            row_factor = (row / row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
            update = torch.mul(row_factor, col.unsqueeze(-2).rsqrt()).mul_(grad)
        else:
            square = state.setdefault("exp_avg_sq", torch.zeros_like(grad))
            square.mul_(0.5).add_(update, alpha=0.5)
            update = square.rsqrt().mul_(grad)
        rms = update.norm(2) / (update.numel() ** 0.5)
        update.div_(rms.clamp(min=1.0)).mul_(group["lr"])
        param.add_(-update)


class Prodigy(torch.optim.Optimizer):
    """A step size from sums over all parameters, kept in the param group (Mishchenko, 2023)."""

    def __init__(self, params, lr=10.0):
        super().__init__(params, {"lr": lr, "d": 1e-3, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        d, denominator = group["d"], 0.0
        group["numerator"] *= 0.9
        stepped = [param for param in group["params"] if param.grad is not None]
        for param in stepped:
            state, grad = self.state[param], param.grad
            if not state:
                state["s"], state["p0"] = torch.zeros_like(param), param.detach().clone()
            moved = (grad * (state["p0"] - param)).sum().item()
            group["numerator"] += d * moved
            state["s"].mul_(0.9).add_(grad, alpha=d)
            denominator += state["s"].abs().sum().item()
        if denominator:
            group["d"] = max(d, group["numerator"] / denominator)
        for param in stepped:
            param.sub_(param.grad, alpha=group["lr"] * group["d"])


BLOCK = 4  # elements that share a scale; 256 in torchao


class EightBitAdam(StandIn):
    """Adam whose states are bytes with a scale for each block of what a rank has, as torchao's."""

    def step_one(self, group, param, grad, state):
        param, grad = map(_on_this_rank, (param, grad))
        count = state["step"] = state.get("step", 0) + 1
        average = _expanded(state, "exp_avg", grad).lerp(grad, 0.1)
        square = _expanded(state, "exp_avg_sq", grad).lerp(grad * grad, 0.001)
        _compress(state, "exp_avg", average)
        _compress(state, "exp_avg_sq", square)
        scale = (square / (1 - 0.999**count)).clamp(min=0).sqrt().add(1e-8)
        param.addcdiv_(average / (1 - 0.9**count), scale, value=-group["lr"])


def _on_this_rank(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _compress(state, key, values):
    """Keep ``values`` as bytes, with one scale for each block."""
    padded = torch.zeros(-(-values.numel() // BLOCK) * BLOCK)
    padded[: values.numel()] = values.flatten()
    blocks = padded.view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
    state[key] = (blocks / scales).round().to(torch.int8), scales


def _expanded(state, key, like):
    if key not in state:
        return torch.zeros_like(like)
    codes, scales = state[key]
    return (codes * scales).flatten()[: like.numel()].view(like.shape)
