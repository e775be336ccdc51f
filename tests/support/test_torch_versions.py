"""Results by version of torch."""

import pytest

from tests.support.side_by_side import assert_row
from tests.support.torch_versions import Changed, on_torch

ROW = Changed("wrong", {"2.9": "error", "2.15": "right"})


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.8.1", "wrong"),
        ("2.9.0+cpu", "error"),
        ("2.14.0a0+git1234", "error"),
        ("2.15.0.dev20260101", "right"),
        ("2.15.1+cu132", "right"),
        ("3.0.0", "right"),
    ],
)
def test_the_newest_change_up_to_a_version_counts(version, expected):
    assert on_torch(ROW, version) == expected
    assert on_torch("as ever", version) == "as ever"


@pytest.mark.parametrize(
    ("peer", "found"), [(Changed("wrong", {"2.0": "right"}), "right"), ("wrong", "wrong")]
)
def test_a_peer_that_does_anything_else_fails_its_row(peer, found):
    assert_row([(found, "right")], peer, "right")
    other = {"right": "wrong", "wrong": "right"}[found]
    with pytest.raises(AssertionError, match="the peer has changed"):
        assert_row([(other, "right")], peer, "right")
    with pytest.raises(AssertionError):
        assert_row([(found, "wrong")], peer, "right")
