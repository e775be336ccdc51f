"""Pages: their links resolve, and those for users of FSDP1 and fairscale name every argument."""

import inspect
import re

from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.api import ShardingStrategy, StateDictType

from tests import ROOT

PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *ROOT.glob("examples/*.md")]
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


def anchors(page):
    """Return the anchors of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_inside_the_repository_resolves():
    broken = []
    for page in PAGES:
        for link in LINK.findall(page.read_text()):
            path, _, anchor = link.partition("#")
            if ":" in path:
                continue
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken, "\n".join(broken)


def test_every_file_that_the_design_pages_name_exists():
    missing = []
    for page in ROOT.glob("docs/maintain/*.md"):
        for name in re.findall(r"`((?:_\w+/|optim/)?\w+\.py)`", page.read_text()):
            if not (ROOT / "src" / "meshard" / name).exists():
                missing.append(f"{page.relative_to(ROOT)}: {name}")
    assert not missing, "\n".join(missing)


def first_column(page):
    """Return the names in the first column of every table."""
    cells = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/migrate" / page).read_text(), re.MULTILINE)
    return set(re.findall(r"`(\w+)", " ".join(cells)))


def test_every_argument_and_every_choice_of_fsdp1_has_a_row():
    asked = {choice.name for kind in (ShardingStrategy, StateDictType) for choice in kind}
    for cls in (FullyShardedDataParallel, MixedPrecision):
        asked |= {name for name in inspect.signature(cls).parameters if name[0] != "_"}
    assert len(asked) > 20 and sorted(asked - first_column("from-fsdp1.md")) == []


# Of version 0.4.13, the last.
FAIRSCALE = """
    module process_group process_group_reduce_scatter reshard_after_forward disable_reshard_on_root
    mixed_precision fp32_reduce_scatter flatten_parameters move_params_to_cpu compute_dtype
    buffer_dtype move_grads_to_cpu bucket_cap_mb compute_device no_broadcast_optim_state
    state_dict_device clear_autocast_cache force_input_to_fp32 verbose cpu_offload offload_config
    state_dict_on_rank_0_only gradient_predivide_factor
"""


def test_every_argument_of_fairscale_has_a_row():
    assert sorted(set(FAIRSCALE.split()) - first_column("from-fairscale.md")) == []
