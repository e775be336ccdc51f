"""Deep copies of modules with units.

A copy has its own units on the same mesh, with their own shards, hooks and settings. The units are
copied first. Then ``copy.deepcopy`` copies the modules, as instances of their original classes. In
its memo, their hooks and parameters find the copied units and shards. At the end, the copied units
are connected with the copied modules and with one another.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from typing import Any

import torch
from torch import nn

from meshard._engine.hooks import gradient_hook_maker
from meshard._engine.lifecycle import Lifecycle
from meshard._engine.unit import (
    Root,
    Unit,
    UnitSettings,
    UnitStep,
    alive,
    own_class,
    unit_of,
    units_in,
)


def copy_with_units(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of ``module``, with copies of all units in it.

    Neither gradients nor unsharded parameters are copied. Nothing is communicated, unless an
    optimizer step waits for the next forward: that step is done first.
    """
    is_grad_enabled = torch.is_grad_enabled()  # inference_mode(False) would enable grad
    with torch.inference_mode(False), torch.set_grad_enabled(is_grad_enabled):
        return _copy_with_units(module, memo)


def _copy_with_units(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    if id(unit_of(module)) in memo:  # an outer call has copied the units
        return _copy_module(module, memo)
    units = _reached_from(module)
    for unit in units:
        unit.lifecycle.check_between_steps(unit, "copy.deepcopy")
        unit.group.check_not_summoned("copied")
        unit.group.finish_pending_step()
        unit.group.check_nothing_is_pending()
        if unit.gradients.window.is_in_loop:
            raise RuntimeError(
                f"unit {unit.label!r} cannot be copied inside a loop over microbatches(), whose "
                "modes the copy would keep; copy it before or after the loop."
            )
    for unit in units:
        memo[id(unit)] = _copy_unit(unit, memo)
    copied = memo[id(module)] = _copy_module(module, memo)
    for unit in units:  # some modules of these units may lie outside of ``module``
        for each in alive(unit.modules):
            copy.deepcopy(each, memo)
    _connect(units, memo)
    return copied


def _copy_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy ``module`` while it has its original class.

    So ``copy.deepcopy`` does not call ``FSDPModule.__deepcopy__`` again, but the user's, if any.
    """
    sharded_class = type(module)
    module.__class__ = own_class(module)
    try:
        copied: nn.Module = copy.deepcopy(module, memo)
    finally:
        module.__class__ = sharded_class
    copied.__class__ = sharded_class
    return copied


def _reached_from(module: nn.Module) -> list[Unit]:
    """List the units in ``module``, and those in other modules that share a unit with them."""
    found: dict[Unit, None] = {}
    modules = [module]
    while modules:
        for unit in units_in(modules.pop(0)):
            if unit not in found:
                found[unit] = None
                modules += alive(unit.modules)
    return list(found)


def _copy_unit(unit: Unit, memo: dict[int, Any]) -> Unit:
    copied = copy.copy(unit)
    copied.modules, copied.siblings, copied.on_reduced = [], [], []
    copied.parent = None
    copied.step = UnitStep()
    unit.group.adopt_edits()
    source = unit.group.unit_params
    params = [param.for_copy(memo) for param in source.params]
    with torch.no_grad():
        is_replicated = unit.gradients.is_replicated
        make_hook = gradient_hook_maker(copied, is_replicated=is_replicated)
        copied.set_params(source.for_copy(params, make_hook))
    copied.group.keeps_storage = unit.group.keeps_storage
    return copied


def _connect(units: list[Unit], memo: dict[int, Any]) -> None:
    """Connect the copied units with the copied modules and with one another, under a new root."""
    copies = [memo[id(unit)] for unit in units]
    root_fqn = units[0].fqn
    for unit, copied in zip(units, copies, strict=True):
        copied.modules = [weakref.ref(memo[id(ref())]) for ref in unit.modules]
        copied.settings = _copy_settings(unit.settings, memo)
        if root_fqn:
            copied.fqn = unit.fqn.removeprefix(root_fqn).removeprefix(".")
        parent = unit.parent() if unit.parent is not None else None
        if parent is not None and id(parent) in memo:
            memo[id(parent)].add_child(copied)
        copied.siblings = [memo[id(sibling)] for sibling in unit.siblings]
        for sibling in copied.siblings:
            sibling.sibling_of = weakref.ref(copied)
        for param, own in zip(unit.params, copied.params, strict=True):
            for owner, name in param.owners:
                if id(owner) in memo:
                    own.add_owner(memo[id(owner)], name)
            own.install(own.sharded)
    names = {group: f"copy of {name}" for group, name in units[0].root.names.items()}
    Root(copies, names, Lifecycle)
    copies[0].lifecycle.take_modes_of(units[0].lifecycle)


def _copy_settings(settings: UnitSettings, memo: dict[int, Any]) -> UnitSettings:
    def copies(refs: list[weakref.ref[Unit]]) -> list[weakref.ref[Unit]]:
        return [weakref.ref(memo[id(unit)]) for ref in refs if id(unit := ref()) in memo]

    return dataclasses.replace(
        settings,
        # Hooks are shared with the original: a hook may hold a stream, which cannot be copied.
        reduce_hooks=list(settings.reduce_hooks),
        forward_prefetch=copies(settings.forward_prefetch),
        backward_prefetch=copies(settings.backward_prefetch),
    )
