"""Tables of units, and records of collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import Self

from meshard._comm.communicator import CommEvent, observers
from meshard._engine.param_group import ParamGroup
from meshard._engine.unit import Unit, alive, joined, units_in
from meshard._gradients.buckets import BucketedGradients
from meshard._params.unit_params import UnitParam, tag_left_out, tag_of
from meshard._torch.user_line import listed
from meshard.optim.owner import owner_reports
from meshard.policies import GradientSync

# --- describe: what is sharded where -------------------------------------------------------------

_WASTEFUL = 1.25  # warn if padding makes a unit this many times as large as its parameters
_MUCH = 2**30  # bytes of shards on a rank from which on memory is worth a line
_COLUMNS = ("unit", "parameters", "dtype", "unsharded", "per rank", "padding", "mesh", "policies")
_SUMMED = ("numel", "unsharded", "per_rank", "padding")
_NUMBERS = {
    # Of ``describe``, ``CommLedger`` and the summary of a timeline.
    *("parameters", "unsharded", "per rank", "padding"),
    *("count", "payload", "sent", "time", "exposed", "hidden"),
    # Of the other commands.
    *("peak", "between nodes", "step", "size", "ranks", "chunks"),
}


def describe(module: nn.Module) -> str:
    """Return a table of the units in ``module``, one line each in module order, and their sum.

    *parameters* are elements of the unit's own parameters, without those of units inside (of those
    that tensor parallelism has cut, this rank's part). *per rank* is the size of a flat shard;
    gradients and optimizer states take a multiple of it. *padding* is how much more the
    ranks of a shard group hold together than the unsharded parameters. *policies* are those that
    differ from the defaults. For each ``owner_optimizer`` a line says how it divides the work.

    Warnings name units with a quarter or more of padding, and trainable parameters that are in no
    unit, or that an optimizer would step in less than float32. From 1 GiB of shards
    per rank on, a line names what would take less memory, and how much less with AdamW in the dtype
    of the shards. Where several CPU ranks communicate, the last line states whether they use shared
    memory, and if not, why.

    Not a collective. Models may be on the meta device, and on fake process groups.

    >>> import meshard
    >>> layer = nn.Sequential(nn.Linear(4, 4, bias=False))
    >>> print(meshard.describe(meshard.fully_shard(layer)))
    unit    parameters  dtype    unsharded  per rank  padding  mesh     policies
    (root)          16  float32       64 B      64 B      0 B  shard 1
    total           16                64 B      64 B      0 B
    """
    units = list(units_in(module))
    groups = [unit.group for unit in units if unit.params]
    sharded = {id(param.sharded) for group in groups for param in group.params}
    # While a unit is unsharded, its modules hold other parameters instead of the sharded ones.
    held = {id(each) for group in groups for param in group.params for each in param.installed()}
    held |= sharded
    left = [param for param in module.parameters() if id(param) not in held]
    paths = {inner: name for name, inner in module.named_modules()}
    roots = {lifecycle: lifecycle.units()[0] for lifecycle in {u.lifecycle for u in units}}
    labels = [_label_in(paths, unit, roots[unit.lifecycle]) for unit in units]
    pairs = list(zip(labels, units, strict=True))
    rows = [row for label, unit in pairs for row in _rows_of(label, unit)]
    if left:
        num_bytes = sum(param.nbytes for param in left)
        dtypes = dict.fromkeys(param.dtype for param in left)
        numel = sum(param.numel() for param in left)
        rows.append(_Row("(no unit)", numel, dtypes, num_bytes, num_bytes, 0, "unsharded"))
    sums = {field: sum(getattr(row, field) for row in rows) for field in _SUMMED}
    rows.append(_Row("total", **sums))
    lines = [*aligned([_COLUMNS, *(row.cells() for row in rows)])]
    for label, unit in pairs:
        lines += _warnings(label, unit.group)
    if any(group.spec.mesh_info.mesh.size() > 1 for group in groups):
        lines += _stray_warning(module, {id(param) for param in left})
    lines += owner_reports(sharded)
    lines += _savings(units)
    reports = [group.comm.memory_report(group.spec.mesh_info.groups) for group in groups]
    return "\n".join([*lines, *filter(None, dict.fromkeys(reports))])


class _Row(NamedTuple):
    """One line of the table."""

    label: str
    numel: int = 0
    dtypes: Iterable[torch.dtype] = ()
    unsharded: int = 0  # bytes
    per_rank: int = 0  # bytes
    padding: int = 0  # bytes, on all ranks of a shard group together
    mesh: str = ""
    policies: str = ""

    def cells(self) -> tuple[str, ...]:
        num_bytes = (self.unsharded, self.per_rank, self.padding)
        dtypes = " + ".join(_short(dtype) for dtype in self.dtypes)
        numbers = (f"{self.numel:,}", dtypes, *map(readable_bytes, num_bytes))
        return (self.label, *numbers, self.mesh, self.policies)


def _label_in(paths: dict[nn.Module, str], unit: Unit, root: Unit) -> str:
    """Return the name of a unit in the table: its dotted name from the described module.

    If the root of the unit is not inside that module, the name begins at the root.
    """
    prefix = next((paths[each] for each in alive(root.modules) if each in paths), "")
    return (joined(prefix, unit.fqn) if unit.fqn else prefix or "(root)") + unit.mesh_name


def _stray_warning(module: nn.Module, left: set[int]) -> Iterator[str]:
    tag_left_out([module])
    names = [
        name
        for name, param in module.named_parameters()
        if id(param) in left and param.requires_grad and tag_of(param)[0] is None
    ]
    if names:
        yield (
            f"warning: {listed(names)} are trainable and in no unit: each rank would train them "
            "apart. Apply fully_shard to the module around them too, or name them in "
            "ignored_params."
        )


def _rows_of(label: str, unit: Unit) -> Iterator[_Row]:
    """Iterate over the rows of a unit: one, or one for each bucket of a replicated module."""
    params, grads = unit.group.params, unit.gradients
    if not isinstance(grads, BucketedGradients) or not params:
        yield _row_of(label, unit, params)
        return
    for number, part in reversed(list(enumerate(grads.parts()))):
        yield _row_of(label + grads.name_of(number), unit, [params[index] for index in part])


def _row_of(label: str, unit: Unit, params: Sequence[UnitParam]) -> _Row:
    group = unit.group
    if not params:
        return _Row(label)
    mesh_info = group.spec.mesh_info
    mesh = f"shard {mesh_info.shard_count}"
    if mesh_info.replicate_group is not None:
        mesh = f"replicate {mesh_info.replicate_count} x {mesh}"
    numel = sum(param.layout.numel for param in params)
    dtypes = dict.fromkeys(param.sharded.dtype for param in params)
    unsharded = sum(param.layout.numel * param.sharded.dtype.itemsize for param in params)
    is_whole = unit.gradients.is_replicated
    per_rank = unsharded if is_whole else group.unit_params.layout.shard_bytes
    padding = per_rank * mesh_info.shard_count - unsharded
    policies = ", ".join(_policies(unit, params))
    return _Row(label, numel, dtypes, unsharded, per_rank, padding, mesh, policies)


def _policies(unit: Unit, params: Sequence[UnitParam]) -> Iterator[str]:
    """Iterate over what differs from the defaults, under the names of the arguments."""
    settings, group = unit.settings, unit.group
    if settings.reshard_after_forward is not None:
        yield f"reshard_after_forward={settings.reshard_after_forward}"
    computed = dict.fromkeys(
        _short(p.unsharded.dtype) for p in params if p.unsharded.dtype != p.sharded.dtype
    )
    if computed:
        num_kept = sum(param.keeps_dtype for param in params)
        but = f" ({num_kept} keep their own)" if num_kept else ""
        yield f"param_dtype={'+'.join(computed)}{but}"
    rules = group.gradients.rules
    chosen = {"reduce": rules.reduce_dtype, "accumulate": rules.chosen_dtype}
    of_unit = {"output": unit.output_dtype, "buffer": unit.buffer_dtype}
    for name, dtype in {**chosen, **of_unit}.items():
        if dtype is not None:
            yield f"{name}_dtype={_short(dtype)}"
    if settings.sync is not GradientSync.FULL:
        yield f"gradient_sync={settings.sync.name}"
    if isinstance(settings.divide_factor, (int, float)):
        yield f"divide_factor={settings.divide_factor:g}"
    if group.unit_params.parts is not None:
        yield "state over replicas"
    if isinstance(group.gradients, BucketedGradients) and group.gradients.comm_hook:
        yield "communication hook"
    if group.unit_params.custom_name is not None:
        yield "custom all-gather"
    if len(unit.modules) > 1:
        yield f"{len(unit.modules)} modules"
    num_frozen = sum(not param.sharded.requires_grad for param in params)
    if num_frozen:
        yield "frozen" if num_frozen == len(params) else "partly frozen"


def _savings(units: Sequence[Unit]) -> Iterator[str]:
    """Yield a line on what would take less memory, in the order of the page "Out of memory"."""
    sharded = [unit for unit in units if unit.params and not unit.gradients.is_replicated]
    groups = [unit.group for unit in sharded if unit.group.spec.host is None]
    sizes = [group.unit_params.layout.shard_bytes for group in groups]
    if (shards := sum(sizes)) < _MUCH:
        return
    kept = [unit for unit in sharded if unit.settings.reshard_after_forward is False]
    unsharded = [p.layout.numel * p.unsharded.dtype.itemsize for u in kept for p in u.params]
    over_replicas = [
        size * (1 - 1 / group.spec.mesh_info.replicate_count)
        for size, group in zip(sizes, groups, strict=True)
        if group.unit_params.parts is None
    ]
    saved = {
        "reshard_after_forward=True": sum(unsharded),
        "local_optimizer(..., over_replicas=True)": 3 * int(sum(over_replicas)),
        'local_optimizer(..., state_device="cpu")': 2 * shards,
        "CPUOffloadPolicy()": 4 * shards,
    }
    named = [f"{readable_bytes(size)} by {name}" for name, size in saved.items() if size]
    yield f"less memory per rank: {', '.join(named[:3])}; see the page 'Out of memory'"


def _warnings(label: str, group: ParamGroup) -> Iterator[str]:
    whole = sum(param.layout.numel * param.sharded.dtype.itemsize for param in group.params)
    held = group.unit_params.layout.shard_bytes * group.spec.mesh_info.shard_count
    times = held / max(whole, 1)
    if times >= _WASTEFUL:
        count = group.spec.mesh_info.shard_count
        worst = max(group.params, key=lambda p: p.layout.range_numel * count - p.layout.numel)
        yield (
            f"warning: {label} gathers and reduces {times:.2f} times its parameters: "
            f"dim {worst.layout.shard_dim} of {worst.fqn!r} has {worst.layout.rows} rows for "
            f"{count} ranks. Shard another dim (shard_placement_fn), or over fewer ranks."
        )
    for param in group.params:
        if param.sharded.requires_grad and is_too_narrow_to_step(param.sharded.dtype):
            yield (
                f"warning: {label} would be stepped in less than float32 (first "
                f"{param.fqn!r}). Keep float32 parameters, and compute in less by "
                "mp_policy=MixedPrecisionPolicy(param_dtype=...)."
            )
            return


def aligned(table: list[tuple[str, ...]]) -> Iterator[str]:
    """Iterate over the lines of a table, with numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    for row in table:
        cells = (
            cell.rjust(width) if name in _NUMBERS else cell.ljust(width)
            for name, cell, width in zip(table[0], row, widths, strict=True)
        )
        yield "  ".join(cells).rstrip()


def is_too_narrow_to_step(dtype: torch.dtype) -> bool:
    """Whether an optimizer on parameters of ``dtype`` works in less than float32."""
    return dtype.is_floating_point and dtype.itemsize < 4


def readable_bytes(num_bytes: int) -> str:
    """Return a number of bytes in the unit that gives at most four digits before the point.

    >>> readable_bytes(2047), readable_bytes(124 * 1024**2), readable_bytes(35 * 1024**3)
    ('2047 B', '124.0 MiB', '35.0 GiB')
    """
    if num_bytes < 10_000:
        return f"{num_bytes} B"
    power = min((num_bytes.bit_length() - 1) // 10, 4)
    return f"{num_bytes / 1024**power:.1f} {('', 'Ki', 'Mi', 'Gi', 'Ti')[power]}B"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- CommLedger: what is communicated ------------------------------------------------------------


class CommLedger:
    """A record of the collectives that meshard issues on this rank inside a ``with`` block.

    Read it inside the block or afterwards; ``print`` gives a table of collectives by unit. Groups
    of one rank issue no collectives.

    Args:
        module: Record only the units that are in this module as the block begins, and the blocking
            collectives (of norms, scalers, checkpoints and ``unsharded_params``) in the process
            groups of their meshes, but not those of other units of the same root. None: everything.

    Attributes:
        events: Every collective, in order: ``op`` (``"all_gather"``, ``"reduce_scatter"``,
            ``"all_reduce"``, ``"all_to_all"``, ``"broadcast"``, ``"gather"``, ``"scatter"``),
            ``unit``, ``group_size``, ``payload_bytes``, ``dtype`` and
            ``wire_bytes``.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(4, 4))
    >>> with meshard.CommLedger() as ledger:
    ...     layer(torch.ones(1, 4)).sum().backward()
    >>> ledger.counts
    {}
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self.events: list[CommEvent] = []
        # What is recorded: all collectives of these communicators, and in these process groups the
        # blocking collectives, which belong to no communicator. None: everything.
        self._recorded: set[object] | None = None
        # What is left out, as (communicator or process group, label of a unit). Units outside of
        # the module may share a communicator or group with units inside; only the label tells them
        # apart.
        self._left_out: set[tuple[object, str]] = set()
        if module is not None and not isinstance(module, nn.Module):
            raise TypeError(f"CommLedger takes the module to record, or nothing, got {module!r}.")
        self._module = module  # until the block begins

    def __str__(self) -> str:
        by_unit: dict[tuple[str, str], list[CommEvent]] = {}
        for event in self.events:
            by_unit.setdefault((event.op, event.unit), []).append(event)
        sums = [(*key, *_sums_of(events)) for key, events in sorted(by_unit.items())]
        header = ("collective", "unit", "count", "payload", "sent")
        return "\n".join(aligned([header, *sums, ("total", "", *_sums_of(self.events))]))

    def _observe(
        self, event: CommEvent, group: dist.ProcessGroup, communicator: object | None
    ) -> None:
        source = group if communicator is None else communicator
        is_recorded = self._recorded is None or source in self._recorded
        if is_recorded and (source, event.unit) not in self._left_out:
            self.events.append(event)

    def _record_only(self, module: nn.Module) -> None:
        units = list(units_in(module))
        roots = {unit.lifecycle for unit in units}
        others = {unit for root in roots for unit in root.units()}.difference(units)
        self._left_out = {
            (source, unit.label)
            for unit in others
            if unit.params
            for source in (unit.group.comm.identity, *unit.group.spec.mesh_info.groups)
        }
        groups = [unit.group for unit in units if unit.params]
        self._recorded = {group.comm.identity for group in groups}
        for group in groups:
            self._recorded.update(group.spec.mesh_info.groups)
            for param in group.params:
                if isinstance(param.sharded, DTensor):
                    self._recorded.update(param.sharded.device_mesh.get_all_groups())

    def __enter__(self) -> Self:
        if self._module is not None:
            self._record_only(self._module)
            self._module = None
        observers.append(self._observe)
        return self

    def __exit__(self, *_: object) -> None:
        observers.remove(self._observe)

    @property
    def counts(self) -> dict[str, int]:
        """How many collectives of each kind."""
        return dict(Counter(event.op for event in self.events))

    @property
    def bytes(self) -> dict[str, int]:
        """Payload bytes of each kind: whole buffers, before they are spread over ranks.

        That of an all-to-all is what all ranks send together.
        """
        totals = Counter[str]()
        for event in self.events:
            totals[event.op] += event.payload_bytes
        return dict(totals)

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends with ring algorithms: ``(n - 1) / n`` of each payload.

        An all-reduce counts twice (Patarasuk and Yuan, 2009). Of an all-to-all it is what this rank
        sends to others.
        """
        return sum(event.wire_bytes for event in self.events)


def _sums_of(events: list[CommEvent]) -> tuple[str, ...]:
    payload, sent = sum(e.payload_bytes for e in events), sum(e.wire_bytes for e in events)
    return str(len(events)), readable_bytes(payload), readable_bytes(sent)
