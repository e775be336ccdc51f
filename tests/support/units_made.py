"""The modules of a model that became units, and what each took."""

from meshard import FSDPModule


def taken_by(model):
    """Return the full name of each parameter that a unit owns, by the name of the unit."""
    names = {}
    holders = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        for name in module._parameters:
            holders.setdefault((module, name), f"{fqn}.{name}" if fqn else name)
    for fqn, module in model.named_modules():
        unit = vars(module).get("_meshard_unit")
        if unit is not None:
            names[fqn] = [[holders[owner, name] for owner, name in p.owners] for p in unit.params]
    return names


def sharded_modules(model):
    return {fqn for fqn, module in model.named_modules() if isinstance(module, FSDPModule)}
