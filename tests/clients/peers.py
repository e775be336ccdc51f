"""Each client, and torch's own ``fully_shard`` in the same script."""

import importlib.util
import re
from dataclasses import dataclass, field
from importlib import metadata

from tests.clients.scripts import PAGES, Server, of_torch, script


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A page of ``docs/how-to/`` whose script runs with both libraries."""

    page: str
    packages: tuple[str, ...]  # as they are imported
    oldest: tuple[int, ...] = ()  # release of the first package that has what the page calls
    num_ranks: int = 2
    peer: dict[str, str] = field(default_factory=dict)  # what torch's script has instead: patterns

    @property
    def missing(self) -> list[str]:
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if self.is_outdated:
            missing.append(f"{self.packages[0]} {'.'.join(map(str, self.oldest))}")
        return missing

    @property
    def is_outdated(self) -> bool:
        """Whether the first package is there, and too old for the page."""
        name = self.packages[0]
        if not self.oldest or importlib.util.find_spec(name) is None:
            return False
        return tuple(map(int, re.findall(r"\d+", metadata.version(name))[:2])) < self.oldest

    def losses(self, server: Server) -> tuple[list[list[float]], list[list[float]]]:
        """Return the losses of all ranks, with torch's ``fully_shard`` and with meshard."""
        code = script(PAGES / f"{self.page}.md")
        peer = code
        for pattern, replacement in self.peer.items():
            peer, count = re.subn(pattern, replacement, peer, flags=re.DOTALL | re.MULTILINE)
            assert count, f"{self.page}.md has no {pattern!r}"
        runs = [server.run(each, self.num_ranks) for each in (of_torch(peer), code)]
        return runs[0].losses, runs[1].losses


PLAIN_SUMS = """
from torch.distributed.fsdp import FSDPModule

set_factor = FSDPModule.set_gradient_divide_factor


def set_factor_of_sums(self, factor):
    self.set_force_sum_reduction_for_comms(True)
    set_factor(self, factor)


FSDPModule.set_gradient_divide_factor = set_factor_of_sums
"""

CLIENTS = [
    # Python 3.10 gets no newer transformers than 5.20.
    Client(page="transformers", packages=("transformers",), oldest=(5, 24)),
    Client(page="transformers-from-pretrained", packages=("transformers",)),
    Client(page="trainer", packages=("transformers", "accelerate")),
    Client(page="accelerate", packages=("transformers", "accelerate")),
    Client(page="peft", packages=("transformers", "peft")),
    Client(page="qlora", packages=("transformers", "peft", "torchao")),
    Client(page="cross-entropy", packages=("transformers",)),
    Client(page="fabric", packages=("lightning",)),
    Client(page="float8", packages=("torchao",)),
    Client(page="pipelining", packages=("numpy",), num_ranks=4),
    Client(page="tensor-parallel", packages=("transformers",), num_ranks=4),
    Client(
        page="data-loader",
        packages=("torchdata",),
        # The peer is not interrupted.
        peer={
            r"^from meshard\.checkpoint .*?\n": "",
            r"^checkpointer = .*?\n": "",
            r"^losses = train\(.*": "losses = train(model, optimizer, loader, until=10)\n",
        },
    ),
    Client(page="state-dict-functions", packages=("numpy",)),
    Client(
        page="torchtitan",
        packages=("torchtitan",),
        # On gloo, a divide factor of torch's needs a plain sum.
        peer={r"^patch_torch\(\).*?\n": PLAIN_SUMS},
    ),
]
