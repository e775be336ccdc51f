"""What is sharded where, and what is communicated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import nn

from meshard._comm.communicator import CommEvent, add_observer, remove_observer
from meshard._engine.unit import Unit, units_in
from meshard._gradients.accumulator import GradientAccumulator
from meshard._mesh.mesh_info import MeshInfo
from meshard._params.subclass_params import SubclassParams
from meshard.policies import GradientSync

_WASTEFUL = 1.25  # padded bytes over bytes of parameters, from which on a line says so
_COLUMNS = ("unit", "parameters", "dtype", "whole", "per rank", "padding", "mesh", "policies")
_NUMBERS = {"parameters", "whole", "per rank", "padding"}


def describe(module: nn.Module) -> str:
    """Return a table of the units in ``module``, one line each in module order, and their sum.

    The columns: elements of the unit's parameters, without those of units inside (of what tensor
    parallelism has cut, the part that this rank holds); dtype at rest; bytes of the whole
    parameters; bytes of the flat shard of each rank, the same on all; bytes that all ranks of a
    shard group together hold beyond the whole parameters, because a dim that the number of ranks
    does not divide is padded; the mesh; and what differs from the defaults of ``fully_shard``.
    Gradients and optimizer states take a multiple of the same. Below the table are warnings: units
    in which padding adds a quarter or more to what is gathered and reduced, and trainable
    parameters that an optimizer would step in less than float32.

    Communicates nothing, and needs no memory: models on the meta device, and process groups that
    only pretend to have many ranks, are described all the same.

    Args:
        module: A module that ``fully_shard`` was applied to, or one around such modules.

    >>> import meshard
    >>> layer = nn.Sequential(nn.Linear(4, 4, bias=False))
    >>> print(meshard.describe(meshard.fully_shard(layer)))
    unit    parameters  dtype    whole  per rank  padding  mesh     policies
    (root)          16  float32   64 B      64 B      0 B  shard 1
    total           16            64 B      64 B      0 B
    """
    rows = [_Row.of(unit) for unit in units_in(module)]
    rows += _outside_of_units(module)
    lines = _aligned([_COLUMNS, *(row.cells() for row in rows), _total(rows).cells()])
    return "\n".join([*lines, *_warnings(rows)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One line of the table."""

    label: str
    numel: int
    unsharded: int  # bytes
    per_rank: int  # bytes
    padding: int  # bytes, on all ranks of a shard group together
    dtypes: tuple[torch.dtype, ...] = ()
    mesh: str = ""
    policies: str = ""
    most_padded: str = ""  # which parameter, in words
    narrow: str = ""  # the first parameter that would be stepped in less than float32

    @classmethod
    def of(cls, unit: Unit) -> _Row:
        """Describe a unit."""
        if unit.group is None:
            return cls(label=unit.label, numel=0, unsharded=0, per_rank=0, padding=0)
        params, mesh_info = unit.group.params, unit.group.spec.mesh_info
        dtypes = [param.sharded.dtype for param in params]
        sizes = list(zip(params, dtypes, strict=True))
        unsharded = sum(param.layout.numel * dtype.itemsize for param, dtype in sizes)
        # What is sent: the padding of every rank goes over the wire as well.
        per_rank = unit.group.tensors.layout.shard_bytes
        worst = max(
            params, key=lambda p: p.layout.range_numel * mesh_info.shard_count - p.layout.numel
        )
        narrow = (
            param.fqn
            for param, dtype in sizes
            if param.sharded.requires_grad and is_too_narrow_to_step(dtype)
        )
        return cls(
            label=unit.label,
            numel=sum(param.layout.numel for param in params),
            unsharded=unsharded,
            per_rank=per_rank,
            padding=per_rank * mesh_info.shard_count - unsharded,
            dtypes=tuple(dict.fromkeys(dtypes)),
            mesh=_mesh(mesh_info),
            policies=", ".join(_policies(unit)),
            most_padded=f"dim {worst.layout.shard_dim} of {worst.fqn!r} has {worst.layout.rows} "
            f"rows for {mesh_info.shard_count} ranks",
            narrow=next(narrow, ""),
        )

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


def _mesh(mesh_info: MeshInfo) -> str:
    shard = f"shard {mesh_info.shard_count}"
    if mesh_info.replicate_group is None:
        return shard
    return f"replicate {mesh_info.replicate_count} x {shard}"


def _policies(unit: Unit) -> Iterator[str]:
    """Say what differs from the defaults, as the arguments are called."""
    settings = unit.settings
    assert unit.group is not None and unit.gradients is not None
    if settings.reshard_after_forward is not None:
        yield f"reshard_after_forward={settings.reshard_after_forward}"
    tensors = unit.group.tensors
    pairs = zip(tensors.compute_dtypes, unit.group.params, strict=True)
    computed = dict.fromkeys(_short(d) for d, param in pairs if d != param.sharded.dtype)
    if computed:
        yield f"param_dtype={'+'.join(computed)}"
    yield from _gradient_dtypes(unit.gradients)
    if unit.casts.outputs is not None:
        yield f"output_dtype={_short(unit.casts.outputs)}"
    if settings.sync is not GradientSync.FULL:
        yield f"gradient_sync={settings.sync.name}"
    if isinstance(settings.divide_factor, (int, float)):
        yield f"divide_factor={settings.divide_factor:g}"
    if isinstance(tensors, SubclassParams):
        yield "extended"
    frozen = sum(not param.sharded.requires_grad for param in unit.group.params)
    if frozen:
        yield "frozen" if frozen == len(unit.group.params) else "partly frozen"


def _gradient_dtypes(gradients: GradientAccumulator) -> Iterator[str]:
    if gradients.rules.reduce_dtype is not None:
        yield f"reduce_dtype={_short(gradients.rules.reduce_dtype)}"
    if gradients.rules.chosen_dtype is not None:
        yield f"accumulate_dtype={_short(gradients.rules.chosen_dtype)}"


def _outside_of_units(module: nn.Module) -> list[_Row]:
    """Return a line for parameters that every rank holds whole, if there are any."""
    owned = {
        id(param.sharded)
        for unit in units_in(module)
        if unit.group is not None
        for param in unit.group.params
    }
    left = [param for param in module.parameters() if id(param) not in owned]
    if not left:
        return []
    num_bytes = sum(param.numel() * param.itemsize for param in left)
    dtypes = tuple(dict.fromkeys(param.dtype for param in left))
    numel = sum(param.numel() for param in left)
    return [
        _Row(
            label="(no unit)",
            numel=numel,
            unsharded=num_bytes,
            per_rank=num_bytes,
            padding=0,
            dtypes=dtypes,
            mesh="whole",
        )
    ]


def _total(rows: list[_Row]) -> _Row:
    return _Row(
        label="total",
        numel=sum(row.numel for row in rows),
        unsharded=sum(row.unsharded for row in rows),
        per_rank=sum(row.per_rank for row in rows),
        padding=sum(row.padding for row in rows),
    )


def _aligned(table: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(_COLUMNS))]
    for row in table:
        cells = (
            cell.rjust(width) if name in _NUMBERS else cell.ljust(width)
            for name, cell, width in zip(_COLUMNS, row, widths, strict=True)
        )
        yield "  ".join(cells).rstrip()


def _warnings(rows: Iterable[_Row]) -> Iterator[str]:
    for row in rows:
        if row.unsharded and (row.unsharded + row.padding) >= _WASTEFUL * row.unsharded:
            times = (row.unsharded + row.padding) / row.unsharded
            yield (
                f"warning: {row.label} gathers and reduces {times:.2f} times its parameters: "
                f"{row.most_padded}. Shard another dim (shard_placement_fn), or over fewer ranks."
            )
    for row in rows:
        if row.narrow:
            yield (
                f"warning: {row.label} would be stepped in less than float32 (first "
                f"{row.narrow!r}). Keep float32 parameters, and compute in less by "
                "mp_policy=MixedPrecisionPolicy(param_dtype=...)."
            )


class CommLedger:
    """Counts every collective that meshard issues on this rank.

    A context manager; what it has seen may be read inside and afterwards. Groups of one rank issue
    nothing, so nothing is counted for them.

    Args:
        module: Count only the units in this module. None: everything in this process.

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
