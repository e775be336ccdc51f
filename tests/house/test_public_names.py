"""Public names: what users import exists, is documented, and is all that they can import."""

import ast
import importlib
import inspect
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp

import meshard
from tests.house.sources import ROOT, SOURCES, Source
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
CALLABLES = [(n, o) for n, o in PUBLIC if inspect.isfunction(o)]
CALLABLES += [
    (f"{name}.{member}", method)
    for name, cls in PUBLIC
    if inspect.isclass(cls)
    for base in cls.__mro__
    if base.__module__.startswith("meshard.")
    for member, method in vars(base).items()
    if inspect.isfunction(method) and not member.startswith("_")
]


def same_arguments(name):
    """Whether a method of ours takes what the method of torch's FSDPModule takes, or more."""
    ours = inspect.signature(getattr(meshard.FSDPModule, name)).parameters.values()
    theirs = inspect.signature(getattr(torch_fsdp.FSDPModule, name)).parameters.values()
    first = [(each.name, each.kind, each.default) for each in ours][: len(theirs)]
    return first == [(each.name, each.kind, each.default) for each in theirs]


def private_imports(sources):
    """Find names with an underscore that one file imports from another."""
    ours = {source.module for source in sources}
    return [
        source.at(node, f"{alias.name} of {node.module}")
        for source in sources
        for node in source.nodes
        if isinstance(node, ast.ImportFrom) and node.module in ours
        for alias in node.names
        if alias.name.startswith("_")
    ]


def undocumented(public):
    """Find objects without a docstring whose first paragraph is a sentence."""
    found = []
    for name, value in public:
        first = inspect.cleandoc(value.__doc__ or "").split("\n\n")[0]
        if not first.endswith((".", "?")):
            found.append(f"{name}: {first!r}")
    return found


def badly_documented_arguments(callables):
    """Find functions whose Args section differs from their signature, or that need one."""
    found = []
    for name, value in callables:
        parameters = [p for p in inspect.signature(value).parameters if p not in ("self", "cls")]
        documented = _documented_arguments(inspect.getdoc(value) or "")
        if documented != parameters and (documented or len(parameters) > 3):
            found.append(f"{name}: takes {parameters}, documents {documented}")
    return found


def _documented_arguments(docstring):
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", docstring, re.MULTILINE)
    if section is None:
        return []
    return re.findall(r"^    \*{0,2}(\w+):", section[1], re.MULTILINE)


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
    init = next(source for source in SOURCES if source.path == "__init__.py")
    imports = [node for node in init.tree.body if isinstance(node, ast.ImportFrom)]
    imports = [node for node in imports if node.module != "typing"]
    aliases = [alias for node in imports for alias in node.names]
    assert all(alias.asname in (None, alias.name) for alias in aliases)
    assert sorted(alias.name for alias in aliases) == sorted(meshard.__all__)


def test_exported_names_are_public_and_live_in_public_files():
    assert [
        (name, value.__module__)
        for name, value in PUBLIC
        if name.startswith("_") or "meshard._" in getattr(value, "__module__", "")
    ] == []


def test_nothing_private_of_another_file_is_imported():
    assert private_imports(SOURCES) == []


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


def test_faults_of_the_page_are_found():
    link = "[a](b.md)"
    rows = [("a", "Does.", link), ("a", "Does", link), ("b", "Does.", "b")]
    rows += [("meshard.compat.gone", "Was.", link), ("meshard.compat.patch_torch", "Is.", link)]
    assert badly_listed(rows, ["a", "c"]) == ["b", "c", "a", "a", "meshard.compat.gone", "a", "b"]
    assert listed("| `a` | A. | [a](b.md) |\n| name | what | where |\n") == [("a", "A.", link)]


def test_every_public_name_has_a_docstring():
    assert undocumented(PUBLIC + CALLABLES) == []


def test_every_public_function_documents_its_arguments_in_google_form():
    assert badly_documented_arguments(CALLABLES) == []


def test_planted_offenders_are_found(monkeypatch):
    monkeypatch.setattr(meshard.FSDPModule, "unshard", lambda self, is_async=False: None)
    assert not same_arguments("unshard")
    files = [
        Source("policies.py", ""),
        Source("api.py", "from meshard.policies import Policy, _check\n"),
    ]
    assert private_imports(files) == ["api.py:1: _check of meshard.policies"]
    assert private_names_in({"a.md": "from meshard._mesh import x\nimport meshard\n"}) == [
        "a.md: from meshard._mesh"
    ]

    def function(a, b):
        """Add.

        Args:
            a: One.
        """

    assert undocumented([("f", function), ("g", lambda: None)]) == ["g: ''"]
    assert badly_documented_arguments([("f", function)]) == ["f: takes ['a', 'b'], documents ['a']"]


def test_tab_completion_shows_public_names_only():
    shown = [name for name in dir(meshard) if not name.startswith("__")]
    assert sorted(shown) == sorted(meshard.__all__)


@pytest.mark.full
def test_the_version_is_that_of_the_package_and_costs_no_import():
    code = "import meshard; assert '__version__' not in vars(meshard)"
    subprocess.run([sys.executable, "-c", code], check=True)
    written = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert meshard.__version__ in (written[1], "0+unknown")
    assert "__version__" in dir(meshard) and not hasattr(meshard, "version")
