"""A report: what torch's fully_shard and ours make of each situation of this folder.

python -m tests.peers                               # a table for the installed torch
python -m tests.peers --save torch-2.15.json        # the same, and kept in a file
python -m tests.peers --page a.json b.json          # the table of docs/migrate/comparison.md
"""

import argparse
import json
import pathlib
import sys
from typing import Any

import torch

from tests.peers import gradients, programs, state
from tests.peers.both import LIBRARIES, SITUATIONS, Situation, run
from tests.support.rank_pool import RankError, RankPool

TIMEOUT_SECONDS = 60

# The lines of the page, and the situation of each.
PAGE = {
    "one parameter is used before the last microbatch, only another of its size in it": (
        gradients.other_parameter_of_same_size
    ),
    "the last microbatch uses a parameter more": gradients.set_grows,
    "the last microbatch uses a parameter less": gradients.set_shrinks,
    "the last microbatch uses none; then the next step": gradients.nothing_at_the_end,
    "`zero_grad()` between two microbatches": gradients.zero_grad_in_window,
    "`step()` before the last microbatch": gradients.step_in_an_open_window,
    "512 microbatches of ones, reduced in bfloat16": gradients.many_ones,
    "units that reshard after some backwards of a window only": (
        programs.resharding_after_backward_toggled_for_some
    ),
    "ranks use different parameters of the same size": (
        gradients.different_parameters_of_the_same_size
    ),
    "ranks leave a unit out of the loss, an auxiliary head": (
        gradients.a_head_in_the_loss_of_some_ranks
    ),
    "a module of a unit is not used": programs.a_module_of_a_unit_is_not_used,
    "a divide factor of 3 on gloo": gradients.divide_by_three,
    "float32 and bfloat16 parameters in one unit": gradients.mixed_dtypes_in_a_unit,
    "a float32 adapter beside a frozen bfloat16 base": gradients.an_adapter_beside_a_narrow_base,
    "parameters frozen, later thawed, between steps": state.frozen_between_steps,
    "parameters thawed under mixed precision": state.thawed_under_mixed_precision,
    "`param.register_hook`": state.hooked,
    "uneven shards of dim 1": gradients.uneven_on_dim_one,
    "even shards of the largest dim": programs.even_shards_of_the_largest_dim,
    "units resharded by hand between forward and backward": programs.units_resharded_by_hand,
    "some units reshard after forward, others do not": (
        programs.resharding_after_forward_toggled_for_some
    ),
    "a submodule run by itself, then the whole trained": state.a_part_first,
    "norms and clipping over two meshes": gradients.norms_over_meshes,
}


def verdict(found: Any, expected: Any) -> str:
    """Return a word for what a situation gave; ``expected`` may be an error by design."""
    if isinstance(found, str) and found.endswith("Error"):
        return "refused" if found == expected else "error"
    return "right" if found == expected else "wrong"


def outcome(pool: RankPool, situation: Situation, lib: str) -> Any:
    """Return what the ranks found: one value if they agree. A hang or a crash is a RankError."""
    try:
        found = pool.run(run, situation.num_ranks, situation.act, lib, timeout=TIMEOUT_SECONDS)
    except RankError:
        return "RankError"
    return found[0] if all(each == found[0] for each in found) else found


def measure() -> dict[str, dict[str, Any]]:
    """Run every situation with both libraries, each with ranks of its own."""
    outcomes = {}
    pools = {lib: RankPool() for lib in LIBRARIES}
    for number, (name, situation) in enumerate(SITUATIONS.items(), 1):
        found = {lib: outcome(pools[lib], situation, lib) for lib in LIBRARIES}
        words = {lib: verdict(found[lib], situation.expected) for lib in LIBRARIES}
        outcomes[name] = {**words, "found": {lib: str(value) for lib, value in found.items()}}
        if sys.stderr.isatty():
            print(f"\r{number} of {len(SITUATIONS)}", end="", file=sys.stderr)
    for pool in pools.values():
        pool.close()
    return outcomes


def table(outcomes: dict[str, dict[str, Any]]) -> str:
    version = torch.__version__.partition("+")[0]
    lines = [f"| situation | torch {version} | meshard | torch gave |", "|---|---|---|---|"]
    for name, each in outcomes.items():
        gave = each["found"]["torch"] if each["torch"] != each["meshard"] else ""
        lines.append(f"| {name.replace('_', ' ')} | {each['torch']} | {each['meshard']} | {gave} |")
    return "\n".join(lines)


def page(paths: list[pathlib.Path]) -> str:
    """Return the table of docs/migrate/comparison.md, from files that ``--save`` has written."""
    saved = [json.loads(path.read_text()) for path in paths]
    versions = [f"torch {'.'.join(each['torch'].split('.')[:2])}" for each in saved]
    lines = [f"| situation | {' | '.join(versions)} | meshard |", "|---" * (len(saved) + 2) + "|"]
    for words, situation in PAGE.items():
        rows = [each["outcomes"][situation.__name__] for each in saved]
        cells = [*(row["torch"] for row in rows), rows[0]["meshard"]]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--save", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--page", type=pathlib.Path, nargs="+", metavar="FILE")
    options = parser.parse_args()
    if options.page:
        print(page(options.page))
        return
    outcomes = measure()
    print(table(outcomes))
    if options.save:
        saved = {"torch": torch.__version__, "outcomes": outcomes}
        options.save.write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
