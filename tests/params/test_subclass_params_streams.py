"""Tensor subclasses with a custom all-gather: order of streams."""

from functools import partial

import pytest

from meshard._comm.all_gather import GatherPlan
from tests.support.extensions import Bfloat16Whole, Int8OnWire, with_matrices_as
from tests.support.fake_device import FakeDevice
from tests.support.spread import slow
from tests.support.stream_steps import MIXED, run_steps


@pytest.mark.parametrize(
    ("kind", "mesh_shape", "reshard_after_forward"),
    [
        slow(Int8OnWire, (4,), None),
        (Int8OnWire, (2, 2), True),
        slow(Bfloat16Whole, (4,), False),
        (Bfloat16Whole, (1,), None),
        slow(Int8OnWire, (4,), 2),
        (Bfloat16Whole, (4,), 2),
    ],
)
def test_a_step_has_no_race(monkeypatch, kind, mesh_shape, reshard_after_forward):
    device, recorder = run_steps(
        monkeypatch,
        mesh_shape,
        prepare=partial(with_matrices_as, kind=kind),
        mp_policy=MIXED,
        reshard_after_forward=reshard_after_forward,
    )
    assert device.races == []
    assert recorder.num_checked > 1000


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Int8OnWire, Bfloat16Whole])
def test_packing_on_another_stream_is_found_out(monkeypatch, kind):
    """What is sent must be written on the lane of the gather, or before it."""
    device, pack = FakeDevice(), GatherPlan._pack
    stray = device.Stream()

    def pack_elsewhere(self, own, segments, inputs):
        with device.stream(stray):
            pack(self, own, segments, [each + 0 for each in inputs])

    monkeypatch.setattr(GatherPlan, "_pack", pack_elsewhere)
    run_steps(monkeypatch, (4,), device, partial(with_matrices_as, kind=kind))
    assert device.races
