"""A table of the losses of all clients: ``python -m tests.clients [PAGE ...]``."""

import sys
import time

from tests.clients.peers import CLIENTS
from tests.clients.scripts import Server


def main() -> int:
    """Print a row per client: losses of the last step on the first rank that has one."""
    pages = sys.argv[1:]
    server, failed = Server(), 0
    row = "{:<28} {:>5} {:>7} {:>11} {:>11} {:>11} {:>10} {:>5}"
    print(row.format("client", "ranks", "losses", "first", "torch", "meshard", "difference", "s"))
    for client in CLIENTS:
        if pages and client.page not in pages:
            continue
        if client.missing:
            print(f"{client.page:<28} needs {', '.join(client.missing)}", flush=True)
            continue
        start = time.monotonic()
        try:
            of_torch, ours = client.losses(server)
        except RuntimeError as error:
            failed += 1
            print(f"{client.page:<28} failed\n{error}", flush=True)
            continue
        pairs = [
            (one, other)
            for rank in zip(of_torch, ours, strict=True)
            for one, other in zip(*rank, strict=True)
        ]
        largest = max(abs(one - other) for one, other in pairs)
        failed += largest > 0
        first = next(losses for losses in of_torch if losses)
        last = next(losses for losses in ours if losses)
        texts = [f"{first[0]:.7f}", f"{first[-1]:.7f}", f"{last[-1]:.7f}"]
        figures = "bitwise 0" if largest == 0 else f"{largest:.1e}"
        seconds = f"{time.monotonic() - start:.0f}"
        print(row.format(client.page, client.num_ranks, len(pairs), *texts, figures, seconds))
    server.close()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
