"""The interface through which the engine uses the parameters of one unit."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from meshard._comm.communicator import Communicator, Handle
from meshard._comm.host_copies import HostCopies
from meshard._mesh.layout import FlatLayout
from meshard._mesh.mesh_info import MeshInfo
from meshard._params.replica_parts import ReplicaParts
from meshard._params.sharded_param import GradientHook, UnitParam
from meshard._params.storage import MemoryLocation

GradientHookMaker = Callable[[int], GradientHook]  # returns the hook of the parameter at an index


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Mesh, device and memory of the parameters of one unit."""

    mesh_info: MeshInfo
    device: torch.device
    # Where shards, gradients and optimizer state live under a CPUOffloadPolicy; None without it.
    host: MemoryLocation | None = None

    @property
    def location(self) -> MemoryLocation:
        return self.host if self.host is not None else MemoryLocation(self.device)


class UnitParams(abc.ABC):
    """Sharded and unsharded parameters of one unit, with the memory behind them."""

    params: Sequence[UnitParam]  # in the order of the module, or of a bucket of ``replicate``
    spec: GroupSpec
    label: str = ""  # the name of the unit, for errors and logs; ``Root`` sets it
    # The communicator of the root, or a variant with the user's collectives. It is set when a unit
    # of the root is first used. Before that it is this placeholder.
    comm: Communicator = Communicator()
    layout: FlatLayout  # how the shards lie in one buffer, or would lie if they were in one
    compute_dtypes: list[torch.dtype]  # of the unsharded parameters, and of their gradients
    host_copies: HostCopies | None = None  # None if shards live on the device
    is_offloaded: bool = False  # meshard.offload has moved the shards away
    # Set if ``.grad`` and optimizer state are of this rank's parts of the shards only.
    parts: ReplicaParts | None = None
    custom_name: str | None = None  # of the first parameter whose shard has fsdp_pre_all_gather

    def _read_dtypes(self) -> None:
        self.compute_dtypes = [param.unsharded.dtype for param in self.params]

    @abc.abstractmethod
    def start_gather(self, comm: Communicator) -> Handle:
        """Start gathering the shards. The result is ``[ranks, n]``.

        **Collective:** the shard group. **Stream:** the comm stream for gathers.
        **Lifetime:** the shards must not be edited until the handle is released.
        """

    @abc.abstractmethod
    def all_gather_copy_out(self, gathered: torch.Tensor) -> None:
        """Allocate the unsharded parameters and fill them from ``gathered [ranks, n]``."""

    @abc.abstractmethod
    def free_unsharded(self) -> None:
        """Free the memory of the unsharded parameters."""

    @property
    @abc.abstractmethod
    def version(self) -> int:
        """A number that grows with each edit that raises a version counter, until ``rebuild``.

        Under ``replicate`` only parameters with a cast copy count: only a copy can be out of date.
        """

    @property
    def has_replacements(self) -> bool:
        """Whether users may have put other tensors in place of ours."""
        # Called before most gathers, so it calls no Python function for each parameter.
        for param in self.params:
            for parameters, name in param.owner_dicts:
                installed = parameters.get(name)
                if installed is not param.sharded and installed is not param.unsharded:
                    return True
        return False

    @abc.abstractmethod
    def take_replacements(self) -> bool:
        """Adopt tensors that users have put in place of ours. Return whether to ``rebuild``."""

    @abc.abstractmethod
    def rebuild(self) -> None:
        """Build storage and hooks anew for the adopted parameters. The unit must be resharded."""

    @abc.abstractmethod
    def for_copy(self, params: Sequence[UnitParam], gradient_hook: GradientHookMaker) -> UnitParams:
        """Return a copy of this object for a copied unit. ``params`` are the copied parameters."""

    @abc.abstractmethod
    def check_materialised(self) -> None:
        """Raise a RuntimeError if shards are on meta, or ``meshard.offload`` has moved them."""
