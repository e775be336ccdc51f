"""Plans: what a step of a job takes and sends, found by running it on phantom tensors."""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike

import torch

from meshard.diagnostics import CommLedger
from meshard.planning.machine import Collective, Machine
from meshard.planning.picture import draw_memory
from meshard.planning.report import screen_of

_Sent = tuple[str, str, int]  # kind of collective, unit, bytes of payload
Job = Callable[[], Callable[[], object]]

_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def bytes_of(size: str | float) -> int:
    """Return a number of bytes, given as such or with a unit.

    >>> bytes_of("80GB"), bytes_of("1.5 GiB"), bytes_of("2KB"), bytes_of(4096)
    (80000000000, 1610612736, 2000, 4096)
    """
    if isinstance(size, (int, float)):
        return int(size)
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-zA-Z]*)\s*", size)
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"a size is a number with a unit such as 80GB or 16GiB, got {size!r}.")
    return int(float(found[1]) * _UNITS[found[2]])


@dataclass(frozen=True, slots=True)
class CollectiveSum:
    """All collectives of one kind in a step."""

    count: int
    payload_bytes: int
    wire_bytes: int  # that this rank sends
    wire_bytes_between_nodes: int  # those in groups with ranks of several nodes


@dataclass(frozen=True, slots=True)
class PlannedMoment:
    """A part of a step, with the most memory that is alive in it."""

    phase: str  # "set-up", "forward", "backward", "optimizer" or "after step"
    unit: str  # that runs; "" outside of units
    bytes_by_kind: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.bytes_by_kind.values())


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """A unit, with what its storages take when the memory of the step peaks."""

    label: str
    shard_bytes: int  # of this rank's shard
    unsharded_bytes: int  # of all parameters, in the dtype of the shards
    padding_bytes: int  # that all ranks of a shard group hold in vain
    is_recomputed: bool  # a part of its forward runs again in backward
    is_resharded: bool  # after its forward
    input_buffers: int  # set_reduce_scatter_max_input_buffers
    bytes_by_kind: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.bytes_by_kind.values())


@dataclass(frozen=True)
class Plan:
    """What one rank of a job takes and sends: see ``plan``.

    ``print`` shows one screen.

    Attributes:
        peak_bytes: The most memory that is alive at once in a step, or before the first one, on
            the device. On the CPU ranks of ``device_type="cpu"`` it is that of all tensors.
        peak_unit: The unit that runs then; ``""`` outside of units.
        peak_phase: ``"set-up"``, ``"forward"``, ``"backward"``, ``"optimizer"`` or
            ``"after step"``.
        bytes_by_kind: The parts of the peak: ``params``, ``grads``, ``optimizer``, ``unsharded``,
            ``activations`` and ``communication``.
        state_bytes: Shards of parameters, gradients and optimizer state, wherever they are.
        host_bytes: The most that is alive in host memory, of what ``CPUOffloadPolicy`` puts there.
        collectives: Of the last step, by kind as ``CommLedger`` names them. Those that the job
            issues, DTensor or torch itself, have names such as ``"all_reduce (others)"``.
        events: Every collective of meshard in the last step, in order.
        peaks: The peak of each step; the first one makes the state of the optimizer.
        setup_peak_bytes: The most before the first step: models that are made whole before they are
            sharded.
        moments: The moment before the last step, and the parts of that step in order, each with the
            most memory in it.
        units: The units, with their parts of the peak.
        not_known: What the plan cannot know, in sentences.
    """

    world_size: int
    rank: int
    ranks_per_node: int
    device_type: str
    peak_bytes: int
    peak_unit: str
    peak_phase: str
    bytes_by_kind: dict[str, int]
    state_bytes: int
    host_bytes: int
    collectives: dict[str, CollectiveSum]
    events: list[Collective] = field(repr=False)
    peaks: list[int]
    setup_peak_bytes: int
    moments: list[PlannedMoment] = field(repr=False)
    units: list[PlannedUnit] = field(repr=False)
    not_known: list[str]

    def fits(self, limit: str | float) -> bool:
        """Whether the peak is at most ``limit``, in bytes or as in ``"80GB"``."""
        return self.peak_bytes <= bytes_of(limit)

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends in a step."""
        return sum(each.wire_bytes for each in self.collectives.values())

    @property
    def wire_bytes_between_nodes(self) -> int:
        """Those of them in groups with ranks of several nodes."""
        return sum(each.wire_bytes_between_nodes for each in self.collectives.values())

    def to_json(self) -> str:
        """Return all fields as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def compare(self, ledger: CommLedger, *, peak_bytes: int | None = None) -> Comparison:
        """Hold the plan against a step that was run.

        Args:
            ledger: Of one whole step, but not of the first. Its collectives must be those of the
                plan, in order.
            peak_bytes: The most memory of tensors that was measured in the run.
        """
        planned = [(each.op, each.unit, each.payload_bytes) for each in self.events]
        ran = [(each.op, each.unit, each.payload_bytes) for each in ledger.events]
        ratio = None if peak_bytes is None else self.peak_bytes / peak_bytes
        return Comparison(_first_difference(planned, ran), len(ran), ratio)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the memory over the last step to an image file, stacked by kind."""
        draw_memory(self, path)

    def __str__(self) -> str:
        return screen_of(self)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A plan beside a run.

    Attributes:
        first_difference: A sentence on the first collective that differs; None if all agree.
        num_collectives: How many the run had.
        peak_ratio: The planned peak by the measured one; None if that was not given.
    """

    first_difference: str | None
    num_collectives: int
    peak_ratio: float | None

    def __str__(self) -> str:
        what = self.first_difference or f"all {self.num_collectives} collectives are as planned"
        if self.peak_ratio is None:
            return what
        return f"{what}; the planned peak is {self.peak_ratio:.3f} of the measured one"


def _first_difference(planned: list[_Sent], ran: list[_Sent]) -> str | None:
    def said(sent: _Sent | None) -> str:
        if sent is None:
            return "none"
        op, unit, payload = sent
        return f"{op} of {unit or '(root)'} with {payload:,} bytes"

    for number, (one, other) in enumerate(itertools.zip_longest(planned, ran)):
        if one != other:
            return f"collective {number}: planned {said(one)}, ran {said(other)}"
    return None


def plan(
    job: Job,
    *,
    world_size: int,
    rank: int = 0,
    ranks_per_node: int = 8,
    device_type: str = "cuda",
    steps: int = 2,
) -> Plan:
    """Find out what a training job takes and sends, before it runs.

    The job is run as one rank of ``world_size``, with the code of meshard and torch that it will
    run, but on tensors whose memory is never touched, in a process group that never communicates.
    No device is needed, and little memory. Most numbers that the job reads, such as losses and
    norms, are zeros.

    Args:
        job: Does what a rank of the real job does: makes a mesh and a model, on any device, shards
            it, and makes an optimizer. It returns a function that runs one whole step on a batch
            that it makes up, with accumulation, clipping and all.
        world_size: How many ranks the job will have.
        rank: Which of them is planned. Ranks may differ in padding. No rank gets objects that
            another one broadcasts: ``dist.broadcast_object_list`` raises on all but its source.
        ranks_per_node: How many ranks share a node, which decides what is sent between nodes.
        device_type: Of the real job. On ``"cpu"``, the ranks send through sockets.
        steps: How many steps to run. The first makes the state of the optimizer, and the last is
            the one that ``collectives`` and ``moments`` are about.

    Returns:
        The plan.

    Raises:
        RuntimeError: This process has a process group already; or the job makes no tensor, or uses
            a model that was made outside of it, and would be changed; or torch knows no such type
            of device.
        TypeError: ``job`` is no function, or does not return one.
        ValueError: A number is out of range, or ``device_type`` has a number.
        Exception: What the job raises.

    >>> import torch, meshard
    >>> from meshard.planning import plan
    >>> def job():
    ...     model = meshard.fully_shard(torch.nn.Linear(1024, 1024, bias=False))
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     def step():
    ...         model(torch.ones(16, 1024)).sum().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     return step
    >>> planned = plan(job, world_size=8)
    >>> planned.state_bytes, planned.collectives["all_gather"].payload_bytes
    (1048576, 4194304)
    """
    if not 0 <= rank < world_size or ranks_per_node < 1 or steps < 1:
        raise ValueError(
            "plan() needs 0 <= rank < world_size, ranks_per_node >= 1 and steps >= 1; got "
            f"{rank=}, {world_size=}, {ranks_per_node=}, {steps=}."
        )
    if torch.device(device_type).type != device_type:
        raise ValueError(
            f"device_type must be a type such as 'cpu' or 'cuda', got {device_type!r}."
        )
    machine = Machine(
        world_size=world_size, rank=rank, ranks_per_node=ranks_per_node, device_type=device_type
    )
    with machine.running():
        step = job()
        if not callable(step):
            raise TypeError(f"job must return a function that runs one step, got {step!r}.")
        for _ in range(steps):
            machine.log.begin_step()
            machine.collectives.clear()
            machine.others.clear()
            step()
        events, others = list(machine.collectives), list(machine.others)
        machine.label(is_last=True)
    machine.measure_workspaces()
    return _plan_of(machine, events, others)


def _plan_of(machine: Machine, events: list[Collective], others: list[Collective]) -> Plan:
    log = machine.log
    setup, *steps = map(log.most_in, range(-1, len(log.step_begins)))
    at_peak = max(*steps, setup, key=operator.attrgetter("total"))
    if not at_peak.total:
        raise RuntimeError("the job has made no tensor; its step must run a model.")
    phase, running = log.moments[at_peak.moment]
    return Plan(
        world_size=machine.world_size,
        rank=machine.rank,
        ranks_per_node=machine.ranks_per_node,
        device_type=machine.device_type,
        peak_bytes=at_peak.total,
        peak_unit=running,
        peak_phase=phase,
        bytes_by_kind=at_peak.by_kind,
        state_bytes=machine.state.total(),
        host_bytes=log.host_peak(),
        collectives=_sums_of([*events, *others]),
        events=events,
        peaks=[each.total for each in steps],
        setup_peak_bytes=setup.total,
        moments=[PlannedMoment(*moment, most.by_kind) for moment, most in log.parts_of_last_step()],
        units=list(_units_of(machine, log.units_at(at_peak.number))),
        not_known=list(_not_known(machine)),
    )


def _sums_of(events: list[Collective]) -> dict[str, CollectiveSum]:
    by_op = defaultdict[str, list[Collective]](list)
    for event in events:
        by_op[event.op].append(event)
    return {
        op: CollectiveSum(
            len(some),
            sum(each.payload_bytes for each in some),
            sum(each.wire_bytes for each in some),
            sum(each.wire_bytes for each in some if each.is_between_nodes),
        )
        for op, some in by_op.items()
    }


def _units_of(machine: Machine, by_unit: Mapping[str, dict[str, int]]) -> Iterator[PlannedUnit]:
    for unit in machine.units():
        group = unit.group
        if not group.params:
            continue
        unsharded = sum(p.layout.numel * p.sharded.dtype.itemsize for p in group.params)
        per_rank = group.unit_params.layout.shard_bytes
        padding = per_rank * group.spec.mesh_info.shard_count - unsharded
        yield PlannedUnit(
            label=unit.label,
            shard_bytes=per_rank,
            unsharded_bytes=unsharded,
            padding_bytes=padding,
            is_recomputed=unit.label in machine.recomputed,
            is_resharded=unit.reshards_after_forward,
            input_buffers=unit.settings.max_input_buffers or (1 if machine.has_device else 3),
            bytes_by_kind=by_unit[unit.label],
        )


def _not_known(machine: Machine) -> Iterator[str]:
    if machine.has_device:
        yield "the reserve and the fragmentation of the caching allocator, and the CUDA context"
        yield "memory of NCCL itself, and workspaces inside of kernels"
    if machine.not_measured:
        names = ", ".join(sorted(machine.not_measured)).replace("mkldnn_", "")
        yield f"what these kernels need while they run, or keep for backward: {names}"
    if machine.has_device:
        yield "host memory of batches, which counts as if it were on the device"
    yield "what depends on values: most numbers that the job reads are zeros"
    if machine.phantom.ran_for_real:
        names = ", ".join(sorted(machine.phantom.ran_for_real))
        yield f"shapes of {names}, which have no implementation on the meta device and were run"
