"""Network time that steps see on any number of ranks, on a pretended network.

One rank of a process group that takes as long as the network would (400 GB/s inside a host of 8
ranks, 50 GB/s across, 5 us for each doubling of the ranks), and sends nothing. What is exposed is
the median step less that with a network of no latency and endless bandwidth, beside what all
collectives of the step take together. On the CPU, where compute is slower, so is the network: by
``--slower``. Losses are not compared: what is gathered is garbage.
"""

from dataclasses import replace

import torch
from torch.distributed.device_mesh import init_device_mesh

from meshard import CommLedger
from tests.benchmarks import contenders
from tests.benchmarks.contenders import (
    OURS,
    OURS_WHOLE,
    PEER,
    PEER_WHOLE,
    WIDTH_512,
    Configuration,
)
from tests.benchmarks.pretend_network import Network, pretend_group
from tests.benchmarks.rounds import in_turns, medians, show

EVERYBODY = (PEER, OURS, PEER_WHOLE, OURS_WHOLE)
NOTHING = Network(inside=float("inf"), across=float("inf"), latency=0.0)
ON_CUDA = Configuration("width 4096, batch 8 x 1024, bfloat16", 4096, 8, 1024, narrow=True)


def measure(ranks, network, device, rounds, configuration):
    """Return median seconds per step of everybody, and seconds that a step communicates for."""
    with pretend_group(ranks, network):
        mesh, batch = init_device_mesh(device.type, (ranks,)), configuration.make_batch(0, device)
        steps, wire = {}, {}
        for name in EVERYBODY:
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


def run(device="cpu", ranks=(8, 64), rounds=9, slower=200.0):
    torch.set_num_threads(1)
    device, network, configuration = torch.device(device), Network(), ON_CUDA
    if device.type == "cpu":
        configuration, network = (
            WIDTH_512,
            replace(
                network,
                inside=network.inside / slower,
                across=network.across / slower,
                latency=network.latency * slower,
            ),
        )
    figures, rows = {}, {}
    for count in ranks:
        # What a rank computes depends on how many there are: its shard is smaller.
        free = measure(count, NOTHING, device, rounds, configuration)["seconds"]
        taken = measure(count, network, device, rounds, configuration)
        for name, seconds in taken["seconds"].items():
            wire, exposed = taken["wire"][name], seconds - free[name]
            row = f"{name}, {count} ranks"
            figures[row] = {"step": seconds, "wire": wire, "exposed": exposed}
            cells = (f"{1e3 * each:.0f}" for each in (seconds, wire, exposed))
            rows[row] = (*cells, f"{1 - exposed / wire:.0%}")
    show(f"{configuration.name}, ms", ("step", "wire", "exposed", "hidden"), rows)
    return figures
