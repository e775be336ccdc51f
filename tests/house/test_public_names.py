"""Is what users import there, documented, and all that they can import?"""

import ast
import inspect
import re

import pytest
import torch.distributed.fsdp as torch_fsdp

import meshard
from tests.house.sources import FILES, ROOT, SRC, module_name, tree

# Names of torch.distributed.fsdp (FSDP2), under which meshard has its own.
FSDP2_NAMES = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
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
    "reshard",
    "set_gradient_divide_factor",
    "set_allocate_memory_from_process_group_for_comm",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_is_last_backward",
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


@pytest.mark.parametrize("name", FSDP2_NAMES)
def test_names_of_fsdp2_exist_here_and_there(name):
    assert name in meshard.__all__
    assert hasattr(torch_fsdp, name)


@pytest.mark.parametrize("name", OWN_NAMES)
def test_own_names_exist(name):
    assert name in meshard.__all__


@pytest.mark.parametrize("name", FSDP2_METHODS)
def test_methods_of_fsdp2_exist_and_take_the_same_arguments(name):
    ours = inspect.signature(getattr(meshard.FSDPModule, name)).parameters.values()
    theirs = inspect.signature(getattr(torch_fsdp.FSDPModule, name)).parameters.values()
    assert [(p.name, p.kind, p.default) for p in ours][: len(theirs)] == [
        (p.name, p.kind, p.default) for p in theirs
    ]


def test_init_exports_exactly_what_it_imports_each_under_its_own_name():
    imports = [n for n in tree(SRC / "__init__.py").body if isinstance(n, ast.ImportFrom)]
    aliases = [alias for node in imports for alias in node.names]
    assert all(alias.asname in (None, alias.name) for alias in aliases)
    assert sorted(alias.name for alias in aliases) == sorted(meshard.__all__)


@pytest.mark.parametrize(("name", "value"), PUBLIC, ids=[n for n, _ in PUBLIC])
def test_exported_names_are_public_and_live_in_public_files(name, value):
    assert not name.startswith("_")
    module = getattr(value, "__module__", "")
    if module.startswith("meshard"):
        assert "._" not in module, f"{name} is defined in {module}"


def test_nothing_private_of_another_file_is_imported():
    ours = {module_name(path) for path in FILES}
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module in ours:
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private, f"{path.name} imports {private} from {node.module}"


def test_documents_and_examples_use_public_names_only():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    for page in pages:
        found = re.findall(r"\b(?:from|import) meshard[\w.]*\._\w+", page.read_text())
        assert not found, f"{page.name}: {found}"


@pytest.mark.parametrize(("name", "value"), PUBLIC, ids=[n for n, _ in PUBLIC])
def test_every_public_name_says_what_it_is(name, value):
    _check_summary(name, value)


@pytest.mark.parametrize(("name", "value"), CALLABLES, ids=[n for n, _ in CALLABLES])
def test_every_public_function_documents_its_arguments_in_google_form(name, value):
    _check_summary(name, value)
    parameters = [p for p in inspect.signature(value).parameters if p not in ("self", "cls")]
    documented = _documented_arguments(inspect.getdoc(value))
    if documented or len(parameters) > 3:
        assert documented == parameters


def _check_summary(name, value):
    docstring = value.__doc__
    assert docstring, f"{name} has no docstring"
    summary = inspect.cleandoc(docstring).splitlines()[0]
    assert summary.endswith((".", "?")), f"{name}: the first line is no sentence: {summary!r}"


def _documented_arguments(docstring):
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", docstring, re.MULTILINE)
    if section is None:
        return []
    return re.findall(r"^    \*{0,2}(\w+):", section[1], re.MULTILINE)
