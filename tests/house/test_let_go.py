"""Mechanisms that guess at the user's code or memory: none of them may come back."""

import re

from tests.house.sources import SOURCES, Source

# `grep -rE "getrefcount|getweakrefcount|_use_count|excepthook|dis\." src` finds nothing.
LET_GO = re.compile(r"getrefcount|getweakrefcount|_use_count|excepthook|dis\.")


def uses(sources):
    return [
        f"{source.path}:{number}: {match[0]}"
        for source in sources
        for number, line in enumerate(source.text.splitlines(), 1)
        for match in LET_GO.finditer(line)
    ]


def test_nothing_of_the_users_is_guessed_at():
    assert uses(SOURCES) == []


def test_a_planted_use_is_found():
    text = "import sys\nif sys.getrefcount(x) == 2:\n    dis.dis(f)\n    dist.all_reduce(x)\n"
    assert uses([Source("_params/storage.py", text)]) == [
        "_params/storage.py:2: getrefcount",
        "_params/storage.py:3: dis.",
    ]
