"""Which tests count as public: those whose code has no private name of meshard."""

import pytest

from tests.support import public

FILES = {
    "src/meshard/_engine/unit.py": "class Unit:\n"
    "    def __init__(self):\n        self._state = 0\n",
    "tests/conftest.py": "def ranks():\n    return 2\n",
    "tests/support/models.py": "def sharded():\n    return mlp()\n\ndef mlp():\n    pass\n",
    "tests/support/insides.py": "from meshard._engine.unit import Unit\n\ndef unit_of(x):\n"
    "    return Unit\n\ndef harmless():\n    pass\n",
    "tests/support/script.py": "import meshard._engine\n",
    "tests/support/found.py": "KEPT = []\n\ndef keep(f):\n    KEPT.append(f)\n\n"
    "@keep\ndef reads(unit):\n    return unit._state\n",
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return what writes a module with ``test_it``, and tells whether that is public."""

    def write(source):
        for name, text in {**FILES, "tests/test_it.py": source}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return public.is_public("tests.test_it", "test_it")

    caches = (public._read, public._used_by, public._private_names)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(public, "ROOT", tmp_path)
    yield write
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize(
    "source",
    [
        "import meshard\n\ndef test_it(ranks):\n    meshard.fully_shard(ranks)\n",
        "from tests.support.models import sharded\n\ndef test_it():\n    sharded()\n",
        "from tests.support.insides import harmless\n\ndef test_it():\n    harmless()\n",
        "from tests.support.insides import unit_of\n\ndef other():\n    unit_of()\n\n"
        "def test_it():\n    pass\n",
        "import torch\n\ndef test_it():\n    torch._engine\n",
        "class Own:\n    def __init__(self):\n        self._state = 1\n\n"
        "def test_it():\n    Own()\n",
        "class Own:\n    pass\n\nregister(Own, 'tests.test_it.Own')\n\n"
        "def test_other(unit):\n    unit._state\n\ndef test_it():\n    pass\n",
    ],
)
def test_public(write, source):
    assert write(source)


@pytest.mark.parametrize(
    "source",
    [
        "def test_it(model):\n    model._meshard_unit\n",
        "def test_it(unit):\n    unit._state\n",
        "def test_it(unit):\n    getattr(unit, '_state')\n",
        "from meshard._engine import unit as u\n\ndef test_it():\n    u.Unit\n",
        "def test_it():\n    from meshard._engine.unit import Unit\n",
        "def test_it():\n    run('import meshard._engine')\n",
        "def test_it():\n    run('-m', 'tests.support.script')\n",
        "def test_it():\n    patch('tests.support.script.meshard')\n",
        "from tests.support.insides import unit_of\n\ndef helper():\n    unit_of()\n\n"
        "def test_it():\n    helper()\n",
        "from tests.support.insides import unit_of\n\nclass Helper:\n    use = unit_of\n\n"
        "def test_it():\n    Helper()\n",
        "from tests.support import insides\n\ndef test_it():\n    insides.unit_of()\n",
        "from tests.support import insides as i\n\n@i.around\ndef test_it():\n    pass\n",
        "from tests.support.insides import gone\n\ndef test_it():\n    gone()\n",
        "from tests.support.found import KEPT\n\ndef test_it():\n    KEPT[0]()\n",
        "def a_fixture(unit):\n    return unit._state\n\ndef test_it(a_fixture):\n    pass\n",
        "@fixture(autouse=True)\ndef before(unit):\n    unit._state\n\ndef test_it():\n    pass\n",
        "import torch\n\ntorch.x = vars(torch)['_meshard_unit']\n\ndef test_it():\n    pass\n",
        "class Own:\n    def __init__(self):\n        self._state = 1\n\n"
        "def test_it(unit):\n    unit._state\n",
        "class Own:\n    def __init__(self):\n        self._state = 1\n\n"
        "def test_it():\n    unit = make()\n    unit._state\n",
        "import meshard\n\nclass Mine(meshard.CommLedger):\n    def _state(self):\n        pass\n\n"
        "def test_it():\n    Mine()\n",
        "from tests.support.models import Base\n\nclass Mine(Base):\n"
        "    def f(self):\n        self._state = 1\n\ndef test_it():\n    Mine()\n",
    ],
)
def test_white_box(write, source):
    assert not write(source)
