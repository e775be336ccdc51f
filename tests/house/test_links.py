"""Links of the documents point to pages and headings that exist."""

import re

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


FILE = re.compile(r"`((?:_\w+/|optim/)?\w+\.py)`")


def test_every_file_that_the_design_pages_name_exists():
    missing = []
    for page in [*ROOT.glob("docs/maintain/*.md"), ROOT / "docs" / "maintain" / "contributing.md"]:
        for name in FILE.findall(page.read_text()):
            if not (ROOT / "src" / "meshard" / name).exists():
                missing.append(f"{page.relative_to(ROOT)}: {name}")
    assert not missing, "\n".join(missing)
