"""What a checkpoint is made of: the model, optimizers, random states, and what users pass along.

Each part gives its state as a *tree* of plain values with tensors in it, and takes one back. Names
of tensors in the checkpoint are those that ``torch.distributed.checkpoint`` uses: the keys on the
way to a tensor, joined by dots.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from meshard._engine.unit import without_compile
from meshard._torch.dtensor import is_plain, place_like, plain_of
from meshard.checkpoint._protocol.plain import Path, embedded, encode, reference, wrapped
from meshard.checkpoint._protocol.storage import CheckpointError
from meshard.checkpoint.weights_layout import fqn_without_wrappers, held_tensors

MODEL, OPTIMIZER, RANDOM = "model", "optimizer", "random"
PARAMETER = "parameter"  # of a model, and not a buffer
RESERVED = (
    MODEL, OPTIMIZER, RANDOM, "step", "strict", "cast", "verify", "metric", "per_rank", "force",
)  # fmt: skip


def join(*path: Any) -> str:
    return ".".join(map(str, path))


class Encoded(NamedTuple):
    """The state of a part: the tree as JSON, and the tensors in it by name."""

    tree: Any
    tensors: dict[str, torch.Tensor]


def encode_part(name: str, state: Any, *, is_optimizer: bool = False) -> Encoded:
    """Return the state of a part for the checkpoint.

    Tensors among the hyperparameters of an optimizer are in its tree, with their values: stages of
    a pipeline have different groups, which are numbered alike.

    Raises:
        TypeError: Something in it is neither a tensor nor plain.
    """
    tensors: dict[str, torch.Tensor] = {}

    def add(path: Path, tensor: torch.Tensor) -> Any:
        if is_optimizer and path[1] == "param_groups" and not isinstance(tensor, DTensor):
            return embedded(tensor)
        local = plain_of(tensor)
        if not is_plain(local) and hasattr(local, "__tensor_flatten__"):  # as torchao's states
            inner, context = local.__tensor_flatten__()
            held = {name: add((*path, name), getattr(local, name)) for name in inner}
            name = join(*path) if isinstance(tensor, DTensor) else None
            return wrapped(local, held, encode(context, add, path), name)
        full = join(*path)
        while full in tensors:  # {"a.b": ..., "a": {"b": ...}}
            full += "'"
        tensors[full] = tensor
        return reference(full)

    return Encoded(encode(state, add, (name,)), tensors)


# --- the model -----------------------------------------------------------------------------


class ModelState(NamedTuple):
    """The tensors of a module, as they are trained on: writing to them changes the module."""

    tensors: dict[str, torch.Tensor]  # by name; tied ones once
    ties: dict[str, str]  # the other names of tied ones
    others: dict[str, Any]  # extra state, and all else that is no tensor of the module
    raw: dict[str, str]  # by name in ``others``: the name in the module's own state dict
    names: dict[int, str]  # by id of a parameter


def without_ddp(module: nn.Module) -> nn.Module:
    """Return the module inside torch's DDP, which may be inside ``torch.compile``."""
    inner = without_compile(module)
    return inner.module if isinstance(inner, DistributedDataParallel) else module


def model_state(model: nn.Module | dict[str, Any]) -> ModelState:
    """Return the state of a module, or of a state dict in its place.

    Raises:
        RuntimeError: It holds gradients that are not fully reduced, which would be lost.
    """
    found = ModelState({}, {}, {}, {}, {})
    by_id: dict[int, str] = {}
    if isinstance(model, dict):
        state, held = model, [each for each in model.values() if isinstance(each, torch.Tensor)]
    else:
        module = without_ddp(model)
        state, held = module.state_dict(keep_vars=True), held_tensors(module)
    own = {id(each) for each in held}
    for raw, value in state.items():
        name = fqn_without_wrappers(raw)
        if id(value) not in own:
            found.others[name], found.raw[name] = value, raw
        elif id(value) in by_id:
            found.ties[name] = by_id[id(value)]
        else:
            by_id[id(value)] = found.names[id(value)] = name
            found.tensors[name] = value
    return found


def load_others(model: nn.Module | dict[str, Any], others: dict[str, Any]) -> None:
    """Give a module, or a state dict, what is no tensor of it."""
    if isinstance(model, dict):
        model.update(others)
    else:
        without_ddp(model).load_state_dict(others, strict=False)


# --- optimizers ----------------------------------------------------------------------------


def optimizer_tree(optimizer: Optimizer, names: dict[int, str]) -> dict[str, Any]:
    """Return the state of an optimizer with names of parameters instead of numbers.

    Raises:
        ValueError: It has a parameter that the model has not, one twice, or two of one name.
    """
    order = [names_of(group, names, optimizer) for group in optimizer.param_groups]
    by_number = dict(enumerate(name for group in order for name in group))
    twice = [name for name, count in Counter(by_number.values()).items() if count > 1]
    if twice:
        ids = [id(param) for group in optimizer.param_groups for param in group["params"]]
        if len(set(ids)) < len(ids):
            raise ValueError(
                f"{type(optimizer).__name__} has the parameter {twice[0]!r} twice; build it on "
                "model.parameters(), which has tied parameters once."
            )
        raise ValueError(
            f"{type(optimizer).__name__} has two parameters {twice[0]!r}, of the model and of a "
            "further module; pass that module under another name."
        )
    state = optimizer.state_dict()
    named = {by_number[number]: dict(each) for number, each in state["state"].items()}
    groups = [
        {**group, "params": own} for group, own in zip(state["param_groups"], order, strict=True)
    ]
    others = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return {"state": named, "param_groups": groups, **others}


def names_of(group: dict[str, Any], names: dict[int, str], optimizer: Optimizer) -> list[str]:
    for param in group["params"]:
        if id(param) not in names:
            raise ValueError(
                f"{type(optimizer).__name__} has a parameter of shape {tuple(param.shape)} that is "
                "not in the model; build the optimizer on the parameters of the model that is "
                "saved or loaded with it, after the last fully_shard."
            )
    return [names[id(param)] for param in group["params"]]


def with_names(tree: dict[str, Any], optimizer: Optimizer, names: dict[int, str]) -> dict[str, Any]:
    """Return an encoded tree with names of parameters. A raw state dict had numbers, as "#0".

    Raises:
        CheckpointError: There are more or fewer parameters than here.
    """
    saved = [name for group in tree["param_groups"] for name in group["params"]]
    if not saved or not saved[0].startswith("#"):
        return tree
    own = [name for group in optimizer.param_groups for name in names_of(group, names, optimizer)]
    if len(own) != len(saved):
        raise CheckpointError(
            f"the optimizer was saved with {len(saved)} parameters without names, and has "
            f"{len(own)} here."
        )
    named = dict(zip(saved, own, strict=True))
    groups = [
        {**group, "params": [named[each] for each in group["params"]]}
        for group in tree["param_groups"]
    ]
    state = {named[each]: state for each, state in tree["state"].items()}
    return {**tree, "state": state, "param_groups": groups}


NAMES = ("params", "param_names")  # the keys of a param group that tell which parameters it has


def numbered(optimizer: Optimizer, names: dict[int, str], tree: dict[str, Any]) -> dict[str, Any]:
    """Return a tree of ``optimizer_tree``, perhaps of other groups, for ``load_state_dict``.

    Raises:
        CheckpointError: The tree is of another kind of optimizer, or the hyperparameters of its
            groups cannot be those of these groups.
    """
    order = [names_of(group, names, optimizer) for group in optimizer.param_groups]
    _check_groups(optimizer, order, tree["param_groups"])
    numbers = {name: number for number, name in enumerate(n for own in order for n in own)}
    saved = {name: group for group in tree["param_groups"] for name in group["params"]}
    groups = []
    for group, own in zip(optimizer.param_groups, order, strict=True):
        given = [saved[name] for name in own if name in saved]
        settings = [{k: v for k, v in each.items() if k not in NAMES} for each in given]
        if any(_differ(each, settings[0]) for each in settings[1:]):
            raise CheckpointError(
                f"a param group of the {type(optimizer).__name__} has parameters that were saved "
                f"in groups with other hyperparameters, such as {own[0]!r}; build the optimizer "
                "with the groups that it had."
            )
        kept = {key: value for key, value in group.items() if key != "params"}
        params = [numbers[name] for name in own]
        groups.append({**kept, **(settings[0] if settings else {}), "params": params})
    state = {numbers[name]: each for name, each in tree["state"].items() if name in numbers}
    others = {key: value for key, value in tree.items() if key not in ("state", "param_groups")}
    return {"state": state, "param_groups": groups, **others}


# Keys that learning-rate schedulers of torch add to a param group.
_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")


def _check_groups(
    optimizer: Optimizer, order: list[list[str]], saved: list[dict[str, Any]]
) -> None:
    """Raise if hyperparameters would be overwritten by those of other groups, or be missing."""
    own = [
        {key: value for key, value in group.items() if key not in NAMES}
        for group in optimizer.param_groups
    ]
    kind = type(optimizer).__name__
    # Groups of which this optimizer has nothing are those of another one, saved together with it.
    own_names = {name for names in order for name in names}
    saved = [group for group in saved if own_names & {*group["params"]}] or saved
    for group in saved:
        # Keys that are missing on one side only may come from another version of torch.
        here = optimizer.defaults.keys() - group.keys()
        there = group.keys() - own[0].keys() - {*NAMES, *_OF_SCHEDULERS}
        if here and there:
            raise CheckpointError(
                f"the optimizer was saved as another kind than {kind}: it has {_listed(there)} and "
                f"lacks {_listed(here)}; load into an optimizer of the class that was saved."
            )
    for group in saved:
        held = {*group["params"]}
        parts = [each for each, names in zip(own, order, strict=True) if held & {*names}]
        if any(_differ(each, parts[0]) for each in parts[1:]):
            raise CheckpointError(
                f"parameters that were saved in one param group, such as {group['params'][0]!r}, "
                f"are in groups of the {kind} with other hyperparameters, which would be lost; "
                "build the optimizer with the groups that it had."
            )


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(keys)))


def _differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether hyperparameters differ, DTensors aside."""

    def of(_: Path, tensor: torch.Tensor) -> Any:
        return None if isinstance(tensor, DTensor) else embedded(tensor)

    return bool(encode(one, of) != encode(other, of))


@torch.inference_mode(False)  # the optimizer may step later: it must hold no inference tensors
@torch.no_grad()
def load_optimizer(optimizer: Optimizer, numbered: dict[str, Any], keep: set[int]) -> None:
    """Load the state of an optimizer. That of ``keep`` has the dtypes of the checkpoint.

    torch's ``load_state_dict`` casts the state to the dtype of the parameter. That would round
    moments in float32 of parameters in bfloat16.
    """
    optimizer.load_state_dict(numbered)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, saved in numbered["state"].items():
        if number in keep:
            # An OwnerOptimizer keeps the state of each parameter on one rank, so ``present`` is
            # empty on the others. It has not cast that state, so nothing is to be restored.
            present = optimizer.state[params[number]]
            if present:
                present.update({key: _uncast(present[key], each) for key, each in saved.items()})


def _uncast(present: Any, saved: Any) -> Any:
    """Return ``present`` with the tensors of ``saved`` wherever torch has cast them."""
    if isinstance(saved, torch.Tensor):
        return present if present.dtype == saved.dtype else saved.to(present.device)
    if type(saved) is dict:
        return {key: _uncast(present[key], each) for key, each in saved.items()}
    if type(saved) in (list, tuple):
        return type(saved)(map(_uncast, present, saved))
    return present


def placed_like(
    tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return an uninitialised tensor, placed like ``tensor`` if that has the same shape.

    If not, it is an ordinary tensor on the CPU, like an optimizer's count of steps.
    """
    if tensor is None or shape != tuple(tensor.shape):
        return torch.empty(shape, dtype=dtype, device="cpu")
    present = plain_of(tensor)
    local = torch.empty(present.shape, dtype=dtype, device=present.device)
    return place_like(tensor, local) if isinstance(tensor, DTensor) else local


# --- what users pass along -----------------------------------------------------------------


def is_stateful(value: object) -> bool:
    """Whether it is such as a scheduler, a scaler, a data loader, or an average of the model."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def check_names(extra: dict[str, Any]) -> None:
    for name in extra:
        if name in RESERVED:
            raise ValueError(f"{name!r} has a meaning in save() and load(); use another name.")
        if not name.isidentifier():  # with a dot, names of its tensors may be those of others
            raise ValueError(f"{name!r} is no name for a keyword; use letters, digits and '_'.")


# --- random states -------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """Return the states of this rank's random number generators."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    accelerator = _accelerator()
    if accelerator is not None:
        state["device"] = accelerator.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(_as_tensor(state["torch"]))
    accelerator = _accelerator()
    if accelerator is not None and "device" in state:
        accelerator.set_rng_state(_as_tensor(state["device"]))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        kind, keys, *others = state["numpy"]
        if isinstance(keys, bytes):  # of format 1
            keys = numpy.frombuffer(keys, dtype="uint32")
        numpy.random.set_state((kind, keys, *others))


def derive_random_state(saved: list[int], rank: int) -> None:
    """Seed the generators of a rank from checksums of all states that were saved."""
    seed = int.from_bytes(hashlib.sha256(repr((saved, rank)).encode()).digest()[:4], "little")
    random.seed(seed)
    torch.manual_seed(seed)  # also seeds devices
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def _accelerator() -> Any:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else torch.get_device_module(accelerator)


def _as_tensor(state: torch.Tensor | bytes) -> torch.Tensor:
    """Return the state of a generator, which format 1 has as bytes."""
    if isinstance(state, torch.Tensor):
        return state
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
