"""Steps of everybody on any number of ranks, on a pretended network, for ``tests/cuda/times.py``.

One rank of a process group that takes as long as the network would, and sends nothing. Losses are
not compared: what is gathered is garbage.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh

from meshard import CommLedger
from tests.benchmarks import contenders
from tests.benchmarks.contenders import OURS, OURS_WHOLE, PEER, PEER_WHOLE
from tests.benchmarks.pretend_network import Network, pretend_group
from tests.benchmarks.rounds import in_turns, medians

NOTHING = Network(inside=float("inf"), across=float("inf"), latency=0.0)


def measure(ranks, network, device, rounds, configuration):
    """Return median seconds per step of everybody, and seconds that a step communicates for."""
    with pretend_group(ranks, network):
        mesh, batch = init_device_mesh(device.type, (ranks,)), configuration.make_batch(0, device)
        steps, wire = {}, {}
        for name in (PEER, OURS, PEER_WHOLE, OURS_WHOLE):
            model = contenders.make(name, configuration, mesh, device)
            steps[name] = contenders.trainer(model, batch)
        for name, peer in ((OURS, PEER), (OURS_WHOLE, PEER_WHOLE)):
            steps[name]()
            with CommLedger() as ledger:
                steps[name]()
            # The peer sends as much: see collectives.py.
            wire[name] = wire[peer] = sum(
                network.seconds(event.payload_bytes, event.group_size) for event in ledger.events
            )

        def finish(step):
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()

        finished = {name: lambda step=step: finish(step) for name, step in steps.items()}
        seconds, _ = in_turns(finished, rounds=rounds, warm_up=3)
        del steps, finished, model
    return {"seconds": medians(seconds), "wire": wire}
