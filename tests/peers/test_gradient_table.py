"""The table of docs/migrate/comparison.md: gradients of torch's fully_shard and of ours.

What a line says follows from its row in the files of peers, which run both libraries.
"""

from tests import ROOT
from tests.peers import test_peer_gradients as gradients
from tests.peers import test_peer_programs as programs
from tests.peers import test_peer_state as state
from tests.peers import test_peer_use as use
from tests.support.torch_versions import on_torch

VERSIONS = ("2.13", "2.15")
ROWS = {
    row: (peer, ours)
    for rows in (gradients.ROWS, gradients.DIVERGENT, programs.ROWS, state.ROWS, use.ROWS)
    for row, peer, ours in rows
}
SITUATIONS = {
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
    "a float32 adapter beside a frozen bfloat16 base": use.an_adapter_beside_a_narrow_base,
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
    "norms and clipping over two meshes": use.norms_over_meshes,
}


def verdict(found, expected):
    """Return the word of the page for what a row found; ``expected`` may be an error."""
    is_error = [isinstance(each, str) and each.endswith("Error") for each in (found, expected)]
    if is_error[0]:
        return "refused" if found == expected else "error"
    return "right" if found == expected else "wrong"


def lines():
    """Return the lines of the table."""
    for situation, row in SITUATIONS.items():
        peer, ours = ROWS[row]
        cells = [verdict(on_torch(peer, version), ours) for version in VERSIONS]
        yield " | ".join(["| " + situation, *cells, verdict(ours, ours) + " |"])


def test_the_page_says_what_the_rows_say():
    page = (ROOT / "docs" / "migrate" / "comparison.md").read_text()
    section = page.partition("# Gradients compared with FSDP2\n")[2]
    found = list(lines())
    assert section.partition("---|\n")[2].partition("\n\n")[0].splitlines() == found
    right = [sum(line.split(" | ")[place] == "right" for line in found) for place in (1, 2)]
    counts = f"Of these {len(found)}, torch 2.13 has {right[0]} right and torch 2.15 {right[1]}"
    assert counts in " ".join(section.split())
    assert not any("wrong" in line.split(" | ")[3] for line in found)


def test_words_of_the_page():
    assert verdict(1.0, 1.0) == "right"
    assert verdict(1.0, 2.0) == verdict(0.0, "ValueError") == "wrong"
    assert verdict("RuntimeError", "right") == verdict("ZeroDivisionError", "ValueError") == "error"
    assert verdict("ValueError", "ValueError") == "refused"
