"""Tables of units, and records of collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import nn

from meshard._comm.communicator import CommEvent, add_observer, remove_observer
from meshard._engine.param_group import ParamGroup
from meshard._engine.unit import Unit, units_in
from meshard._params.subclass_params import SubclassParams
from meshard.policies import GradientSync

# --- describe: what is sharded where -------------------------------------------------------------

_WASTEFUL = 1.25  # warn if padding makes a unit this many times as large as its parameters
_COLUMNS = ("unit", "parameters", "dtype", "unsharded", "per rank", "padding", "mesh", "policies")
_NUMBERS = {"parameters", "unsharded", "per rank", "padding"}


def describe(module: nn.Module) -> str:
    """Return a table of the units in ``module``, one line each in module order, and their sum.

    The columns:

    * *parameters*: elements of the unit's own parameters, without those of units inside. Of a
      parameter that tensor parallelism has cut, the part that this rank holds.
    * *dtype*: of the shards.
    * *unsharded*: bytes of the unsharded parameters.
    * *per rank*: bytes of the flat shard of each rank, the same on all. Gradients and optimizer
      states take a multiple of it.
    * *padding*: bytes that all ranks of a shard group together hold beyond the unsharded
      parameters, because a dim that the number of ranks does not divide is padded.
    * *mesh*, and *policies* that differ from the defaults of ``fully_shard``.

    Warnings below the table name units in which padding adds a quarter or more to what is gathered
    and reduced, and trainable parameters that an optimizer would step in less than float32.
    Where several CPU ranks communicate, the last line states whether they use shared memory, and
    why not.

    Not a collective, and needs no memory: it also describes models on the meta device and on fake
    process groups.

    Args:
        module: A module that ``fully_shard`` was applied to, or one around such modules.

    >>> import meshard
    >>> layer = nn.Sequential(nn.Linear(4, 4, bias=False))
    >>> print(meshard.describe(meshard.fully_shard(layer)))
    unit    parameters  dtype    unsharded  per rank  padding  mesh     policies
    (root)          16  float32       64 B      64 B      0 B  shard 1
    total           16                64 B      64 B      0 B
    """
    rows = [_row_of_unit(unit) for unit in units_in(module)]
    rows += _rows_outside_of_units(module)
    total = _Row(
        label="total",
        numel=sum(row.numel for row in rows),
        unsharded=sum(row.unsharded for row in rows),
        per_rank=sum(row.per_rank for row in rows),
        padding=sum(row.padding for row in rows),
    )
    lines = _aligned([_COLUMNS, *(row.cells() for row in [*rows, total])])
    warnings = [warning for row in rows for warning in row.warnings]
    return "\n".join([*lines, *warnings, *_memory_reports(units_in(module))])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One line of the table."""

    label: str
    numel: int = 0
    unsharded: int = 0  # bytes
    per_rank: int = 0  # bytes
    padding: int = 0  # bytes, on all ranks of a shard group together
    dtypes: Iterable[torch.dtype] = ()
    mesh: str = ""
    policies: str = ""
    warnings: tuple[str, ...] = ()

    def cells(self) -> tuple[str, ...]:
        """Return the text of each column."""
        return (
            self.label,
            f"{self.numel:,}",
            " + ".join(_short(dtype) for dtype in self.dtypes),
            readable_bytes(self.unsharded),
            readable_bytes(self.per_rank),
            readable_bytes(self.padding),
            self.mesh,
            self.policies,
        )


def _row_of_unit(unit: Unit) -> _Row:
    group = unit.group
    if group is None:
        return _Row(label=unit.label)
    mesh_info = group.spec.mesh_info
    mesh = f"shard {mesh_info.shard_count}"
    if mesh_info.replicate_group is not None:
        mesh = f"replicate {mesh_info.replicate_count} x {mesh}"
    unsharded = sum(param.layout.numel * param.sharded.dtype.itemsize for param in group.params)
    per_rank = group.storage.layout.shard_bytes
    padding = per_rank * mesh_info.shard_count - unsharded
    return _Row(
        label=unit.label,
        numel=sum(param.layout.numel for param in group.params),
        unsharded=unsharded,
        per_rank=per_rank,
        padding=padding,
        dtypes=dict.fromkeys(param.sharded.dtype for param in group.params),
        mesh=mesh,
        policies=", ".join(_policies(unit, group)),
        warnings=tuple(_warnings(unit.label, group, 1 + padding / max(unsharded, 1))),
    )


def _rows_outside_of_units(module: nn.Module) -> list[_Row]:
    """Return a line for the parameters that are in no unit, if there are any."""
    groups = [unit.group for unit in units_in(module) if unit.group is not None]
    sharded = {id(param.sharded) for group in groups for param in group.params}
    left = [param for param in module.parameters() if id(param) not in sharded]
    if not left:
        return []
    num_bytes = sum(param.nbytes for param in left)
    return [
        _Row(
            label="(no unit)",
            numel=sum(param.numel() for param in left),
            unsharded=num_bytes,
            per_rank=num_bytes,
            dtypes=dict.fromkeys(param.dtype for param in left),
            mesh="unsharded",
        )
    ]


def _policies(unit: Unit, group: ParamGroup) -> Iterator[str]:
    """Iterate over what differs from the defaults, under the names of the arguments."""
    settings, gradients = unit.settings, unit.gradients
    assert gradients is not None
    if settings.reshard_after_forward is not None:
        yield f"reshard_after_forward={settings.reshard_after_forward}"
    pairs = zip(group.storage.compute_dtypes, group.params, strict=True)
    computed = dict.fromkeys(_short(dtype) for dtype, p in pairs if dtype != p.sharded.dtype)
    if computed:
        yield f"param_dtype={'+'.join(computed)}"
    if gradients.rules.reduce_dtype is not None:
        yield f"reduce_dtype={_short(gradients.rules.reduce_dtype)}"
    if gradients.rules.chosen_dtype is not None:
        yield f"accumulate_dtype={_short(gradients.rules.chosen_dtype)}"
    if unit.output_dtype is not None:
        yield f"output_dtype={_short(unit.output_dtype)}"
    if settings.sync is not GradientSync.FULL:
        yield f"gradient_sync={settings.sync.name}"
    if isinstance(settings.divide_factor, (int, float)):
        yield f"divide_factor={settings.divide_factor:g}"
    if isinstance(group.storage, SubclassParams):
        yield "tensor subclass"
    num_frozen = sum(not param.sharded.requires_grad for param in group.params)
    if num_frozen:
        yield "frozen" if num_frozen == len(group.params) else "partly frozen"


def _warnings(label: str, group: ParamGroup, times: float) -> Iterator[str]:
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


def _aligned(table: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    for row in table:
        cells = (
            cell.rjust(width) if name in _NUMBERS else cell.ljust(width)
            for name, cell, width in zip(_COLUMNS, row, widths, strict=True)
        )
        yield "  ".join(cells).rstrip()


def _memory_reports(units: Iterable[Unit]) -> list[str]:
    groups = [unit.group for unit in units if unit.group is not None]
    reports = [group.comm.memory_report(group.spec.mesh_info.groups) for group in groups]
    return [report for report in dict.fromkeys(reports) if report]


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

    Read it inside the block or afterwards. Groups of one rank issue no collectives.

    Args:
        module: Record only the units in this module. None: everything in this process.

    Attributes:
        events: Every collective, in order: ``op`` (``"all_gather"``, ``"reduce_scatter"``,
            ``"all_reduce"`` or, before training, ``"broadcast"``), ``unit``, ``group_size``,
            ``payload_bytes``, ``dtype`` and ``wire_bytes``.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(4, 4))
    >>> with meshard.CommLedger() as ledger:
    ...     layer(torch.ones(1, 4)).sum().backward()
    >>> ledger.counts
    {}
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self.events: list[CommEvent] = []
        self._communicators: set[int] | None = None
        if module is not None:
            self._communicators = {
                id(unit.group.comm.identity) for unit in units_in(module) if unit.group is not None
            }

    def _observe(self, event: CommEvent, communicator: object) -> None:
        if self._communicators is None or id(communicator) in self._communicators:
            self.events.append(event)

    def __enter__(self) -> CommLedger:
        add_observer(self._observe)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        remove_observer(self._observe)

    @property
    def counts(self) -> dict[str, int]:
        """How many collectives of each kind."""
        counts: dict[str, int] = {}
        for event in self.events:
            counts[event.op] = counts.get(event.op, 0) + 1
        return counts

    @property
    def bytes(self) -> dict[str, int]:
        """Payload bytes of each kind: whole buffers, before they are spread over ranks."""
        totals: dict[str, int] = {}
        for event in self.events:
            totals[event.op] = totals.get(event.op, 0) + event.payload_bytes
        return totals

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends with ring algorithms: ``(n - 1) / n`` of each payload.

        An all-reduce counts twice (Patarasuk and Yuan, 2009).
        """
        return sum(event.wire_bytes for event in self.events)
