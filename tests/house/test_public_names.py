"""Public names: what users import exists, is documented, and is all that they can import."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp

import meshard
from tests import ROOT
from tests.house.test_links import LINK

# Names of torch.distributed.fsdp (FSDP2), under which meshard has its own.
FSDP2_NAMES = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
SINCE = {
    "DataParallelMeshDims": "2.12",
    "set_symm_mem_for_comm": "2.12",
    "set_reduce_scatter_max_input_buffers": "2.13",
    "set_separate_reduce_scatter_group": "2.13",
    "GradientReductionHandle": "2.15",
    "finalize_backward": "2.15",
    "set_keep_unsharded_storage": "2.15",
    "set_manual_backward_finalization": "2.15",
}
TOO_NEW = [name for name, since in SINCE.items() if torch.__version__ < since]
OWN_NAMES = [
    "CommLedger",
    "GradientSync",
    "ShardPlacementResult",
    "describe",
    "fully_shard_units",
    "materialize",
    "overlap_optimizer",
]

# Methods that FSDP2 has, with their arguments.
FSDP2_METHODS = [
    "finalize_backward",
    "reshard",
    "set_gradient_divide_factor",
    "set_allocate_memory_from_process_group_for_comm",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_is_last_backward",
    "set_keep_unsharded_storage",
    "set_manual_backward_finalization",
    "set_modules_to_backward_prefetch",
    "set_modules_to_forward_prefetch",
    "set_post_optim_event",
    "set_reduce_scatter_max_input_buffers",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "set_separate_reduce_scatter_group",
    "set_symm_mem_for_comm",
    "unshard",
]

PUBLIC = [(name, getattr(meshard, name)) for name in meshard.__all__]


def same_arguments(name):
    """Whether a method of ours takes what the method of torch's FSDPModule takes, or more."""
    ours = inspect.signature(getattr(meshard.FSDPModule, name)).parameters.values()
    theirs = inspect.signature(getattr(torch_fsdp.FSDPModule, name)).parameters.values()
    first = [(each.name, each.kind, each.default) for each in ours][: len(theirs)]
    return first == [(each.name, each.kind, each.default) for each in theirs]


def private_names_in(pages):
    """Find imports of private modules of the library in ``{name: text}``."""
    return [
        f"{name}: {match}"
        for name, text in pages.items()
        for match in re.findall(r"\b(?:from|import) meshard[\w.]*\._\w+", text)
    ]


def test_names_of_fsdp2_exist_here_and_there():
    names = [name for name in FSDP2_NAMES if name not in TOO_NEW]
    assert [name for name in names if not hasattr(torch_fsdp, name)] == []
    assert [name for name in FSDP2_NAMES + OWN_NAMES if name not in meshard.__all__] == []


def test_methods_of_fsdp2_exist_and_take_the_same_arguments():
    names = [name for name in FSDP2_METHODS if name not in TOO_NEW]
    assert [name for name in names if not same_arguments(name)] == []


def test_init_exports_exactly_what_it_imports_each_under_its_own_name():
    tree = ast.parse(Path(meshard.__file__).read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    imports = [node for node in imports if node.module != "typing"]
    aliases = [alias for node in imports for alias in node.names]
    assert all(alias.asname in (None, alias.name) for alias in aliases)
    assert sorted(alias.name for alias in aliases) == sorted(meshard.__all__)


def test_documents_and_examples_use_public_names_only():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    assert private_names_in({page.name: page.read_text() for page in pages}) == []


def listed(page):
    """Return the names, lines and links of all rows of the page of public names."""
    return re.findall(r"^\| `([\w.]+)` \| (.+) \| (.+) \|$", page, re.MULTILINE)


def badly_listed(rows, exported):
    """Find names that are missing, unknown or listed twice, and rows without sentence or link."""
    names = [name for name, _, _ in rows]
    top = [name for name in names if "." not in name and not name.isupper()]
    found = sorted(set(exported).symmetric_difference(top))
    found += [name for name in names if names.count(name) > 1]
    for name in set(names).difference(top):
        path, _, attribute = name.rpartition(".")
        if path and not hasattr(importlib.import_module(path), attribute):
            found.append(name)
    is_row = re.compile(r"[A-Z`].*\.").fullmatch
    return found + [n for n, line, link in rows if not is_row(line) or not LINK.fullmatch(link)]


def test_the_page_of_public_names_lists_each_with_a_line_and_a_link():
    rows = listed((ROOT / "docs" / "reference" / "api.md").read_text())
    assert badly_listed(rows, meshard.__all__) == []


def test_tab_completion_shows_public_names_only():
    shown = [name for name in dir(meshard) if not name.startswith("__")]
    assert sorted(shown) == sorted(meshard.__all__)


@pytest.mark.slow
def test_the_version_is_that_of_the_package_and_costs_no_import():
    code = "import meshard; assert '__version__' not in vars(meshard)"
    subprocess.run([sys.executable, "-c", code], check=True)
    written = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert meshard.__version__ in (written[1], "0+unknown")
    assert "__version__" in dir(meshard) and not hasattr(meshard, "version")
