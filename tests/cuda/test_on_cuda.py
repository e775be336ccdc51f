"""The checks of ``run_all.py``: on a CUDA device, and rehearsed on the CPU."""

import pytest
import torch

from tests.cuda.run_all import BAD, PARTS, run_part, table


def check(part, kind, folder):
    rows = run_part(part, kind, 290, folder / "log")
    print(table(rows))
    assert rows
    assert not any(row.result in BAD for row in rows), (folder / "log").read_text()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("part", PARTS)
def test_on_a_device(part, tmp_path):
    check(part, "cuda", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_in_a_rehearsal(part, tmp_path):
    check(part, "cpu", tmp_path)
