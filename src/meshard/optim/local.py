"""Optimizers on ordinary tensors over this rank's shards.

An ordinary optimizer on sharded parameters dispatches every operation of every parameter through
DTensor, which takes longer than the arithmetic if shards are small. A pointwise optimizer treats
each element by itself, so it may as well step the local tensors. The optimizer that users hold has
the ordinary ``param_groups`` and ``state``; ``mapping.py`` says how.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from meshard._engine.unit import require_units
from meshard._optimizer_hooks import watch_reads_and_clipping
from meshard._torch.patches import params_in
from meshard.optim.host_state import StreamedStep, check_host_state
from meshard.optim.local_step import POINTWISE, LocalStep
from meshard.optim.mapping import (
    MappedOptimizer,
    Params,
    check_makes_optimizers,
    check_template,
    check_wait,
    params_of,
)
from meshard.optim.replicas import PartsGather, cut_over_replicas
from meshard.policies import check_bool, check_can_be_added, check_positive


class LocalOptimizer(MappedOptimizer):
    """An optimizer on this rank's shards: see ``local_optimizer``."""

    _maker = "local_optimizer"

    def __init__(
        self,
        template: Optimizer,
        step: LocalStep | StreamedStep | None = None,  # None: made here
        gathers: Sequence[PartsGather] = (),
        *,
        state_dtype: torch.dtype | None = None,
        waits_in_step: bool = True,
    ) -> None:
        self._waits_in_step = waits_in_step  # for ``gathers``; if not, each next gather waits
        self._gathers, self._state_dtype = gathers, state_dtype
        super().__init__(template)
        self._class: Callable[..., Optimizer] = type(template)
        self._step = step or LocalStep(self._class, template.defaults)
        self._private = [self._step]

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy this as the ordinary optimizer that it takes over."""
        if self._gathers or self._state_dtype or isinstance(self._step, StreamedStep):
            return super().__reduce_ex__(protocol)  # refuses
        template = self._class([dict(group) for group in self.param_groups])
        template.state.update(self.state)
        template.defaults.update(self.defaults)
        return LocalOptimizer, (template,)

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient. Not a collective, but every rank must step.

        ``closure`` computes the loss anew, and is called first.

        Raises:
            RuntimeError: Gradients are pending: see ``meshard.pending_gradients``. Or you have set
                one whose placements are not those of its parameter.
        """
        loss = self._loss_of(closure)
        self.wait()
        self._step.take(self.param_groups, self._state)
        self._step.run()
        for gather in self._gathers:
            gather.start()
        if self._waits_in_step:
            self.wait()
        return loss

    def wait(self) -> None:
        """Wait until all shards have the weights that other replicas have stepped.

        With ``wait="gather"``, call this before you read or change parameters by an operator.
        **Stream:** the current one waits; on CPU the host does.
        """
        for gather in self._gathers:
            gather.group.finish_pending_step()


def local_optimizer(
    module: nn.Module,
    optimizer: type[Optimizer],
    param_groups: Params | None = None,
    *,
    over_replicas: bool = False,
    master_dtype: torch.dtype | None = None,
    wait: str = "step",
    state_device: str | torch.device | None = None,
    chunk_bytes: int | None = None,
    **optimizer_kwargs: Any,
) -> LocalOptimizer:
    """Return an optimizer that steps ``module`` as ``optimizer`` would, on ordinary tensors.

    The numbers are the same, but the host needs a fraction of the time, because no operation is
    dispatched through DTensor.

    Args:
        module: With units in it. Build the optimizer after the last ``fully_shard``.
        optimizer: One of torch's pointwise optimizers: ``SGD``, ``Adam``, ``AdamW``, ``Adagrad``,
            ``Adadelta``, ``Adamax``, ``RMSprop``, ``NAdam``, ``RAdam``, ``ASGD``, ``Rprop``.
        param_groups: As for that optimizer; None: all parameters of ``module`` that are not frozen
            now. To thaw some later, pass them too.
        over_replicas: On a mesh ``(replicate, shard)``, cut state and reduced gradients over the
            replicas too: each of ``R`` replicas keeps and steps one ``R``-th of its shards. The
            all-reduce over the replicas becomes a reduce-scatter, and after a step an all-gather
            brings the new weights: as many bytes. The units' trainable parameters must all be in
            ``param_groups``. ``.grad`` has this rank's part, so that norms count each element once.
        master_dtype: Keep the weights that are stepped, and the state, in this dtype, such as
            ``torch.float32`` for parameters in bfloat16, and ``.grad`` too. Load weights into the
            model before the first step, or with the state of the optimizer, which has them.
        wait: When all replicas have the new weights, with ``over_replicas``. ``"step"``: when
            ``step`` returns. ``"gather"``: the next gather of each unit waits, and what reads a
            sharded parameter; before you use one in another way call ``wait`` of what is returned.
        state_device: ``"cpu"``: state, and masters, rest in pinned host memory, and are on the
            device for the time in which they are stepped, two chunks at once. The numbers are the
            same. None: they stay on the device.
        chunk_bytes: Of parameters whose state is on the device at once. None: those of a unit.
        **optimizer_kwargs: Passed on to ``optimizer``.

    Returns:
        An optimizer with the ``param_groups``, ``state`` and ``state_dict`` of the ordinary one.
        With ``over_replicas``, ``step`` is a **collective** of the replicas.

    Raises:
        TypeError: ``optimizer`` is none of these classes. A subclass of one is refused too.
        ValueError: There is no unit in ``module``, or ``differentiable=True``; a unit cannot cut
            its state over replicas (the text says why), or its shards are in host memory too.
        RuntimeError: With ``over_replicas``, a forward or backward is under way.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2))
    >>> optimizer = meshard.local_optimizer(layer, torch.optim.AdamW, lr=1e-3)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    """
    check_makes_optimizers("local_optimizer", optimizer)
    if optimizer not in POINTWISE:
        names = ", ".join(each.__name__ for each in POINTWISE)
        raise TypeError(
            f"local_optimizer steps shards as ordinary tensors, which is right for {names}; "
            f"{getattr(optimizer, '__name__', optimizer)!r} is none of them: build it on "
            "module.parameters() as usual."
        )
    units = require_units(module)
    make: Callable[..., Optimizer] = optimizer
    template = make(params_of(module, param_groups), **optimizer_kwargs)
    check_template("local_optimizer", template)
    check_wait(wait)
    check_bool("over_replicas", over_replicas)
    check_can_be_added("master_dtype", master_dtype)
    if chunk_bytes is not None:
        check_positive("chunk_bytes", chunk_bytes)
    defaults = template.defaults
    step: LocalStep | StreamedStep = LocalStep(make, defaults, master_dtype)
    if state_device is not None:
        check_host_state(units, state_device)
        make_step = functools.partial(LocalStep, make, defaults, master_dtype)
        step = StreamedStep(make_step, units[0].group, chunk_bytes)
    gathers: Sequence[PartsGather] = ()
    if over_replicas:
        for unit in units:
            unit.lifecycle.check_between_steps(unit, "local_optimizer(..., over_replicas=True)")
        watch_reads_and_clipping()
        gathers = cut_over_replicas(units, params_in(template))
    if master_dtype is not None:
        for param in params_in(template):
            param.grad_dtype = master_dtype
    return LocalOptimizer(
        template, step, gathers, state_dtype=master_dtype, waits_in_step=wait == "step"
    )
