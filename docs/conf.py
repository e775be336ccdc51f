"""The site: ``sphinx-build -W -b html docs build/site``."""

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_extensions"))
sys.path.insert(0, str(ROOT / "src"))

project = "meshard"
author = copyright = "The meshard authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "messages"]
exclude_patterns = ["_extensions"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 88  # longer ones have a line for each argument

smartquotes = False  # texts of errors stand in the pages as they are

html_theme = "furo"
html_title = "meshard"
html_show_sourcelink = False
html_copy_source = False
html_extra_path = ["llms.txt"]

_OUTSIDE = re.compile(
    r"\[([^\]]+)\]\(((?:\.\./)+(?:src|examples|tests|README|CHANGELOG|LICENSE)[^)]*)\)"
)


def _name_files_outside(_app: Any, page: str, source: list[str]) -> None:
    """Turn links to files outside of the site into their names, and leave out missing pages."""

    def named(match: re.Match[str]) -> str:
        file = match[2].split("#")[0].replace("../", "")
        return match[1] if file in match[1] else f"{match[1]} (`{file}`)"

    if page == "how-to/index":  # pages that are not written yet are not listed
        lines = source[0].splitlines()
        here = ROOT / "docs" / "how-to"
        kept = [x for x in lines if not re.fullmatch(r"[\w-]+", x) or (here / f"{x}.md").is_file()]
        source[0] = "\n".join(kept) + "\n"

    source[0] = _OUTSIDE.sub(named, source[0])


def setup(app: Any) -> None:
    """Connect what changes the pages."""
    app.connect("source-read", _name_files_outside)
