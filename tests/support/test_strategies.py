"""The strategies: they draw what they promise."""

from hypothesis import find, given
from hypothesis import strategies as st

from tests.support import strategies


@given(strategies.meshes(), strategies.divide_factors())
def test_meshes_fit_and_factors_have_a_positive_value(mesh, factor):
    assert 1 <= strategies.num_ranks(mesh) <= strategies.MAX_RANKS
    assert strategies.as_number(factor, mesh) > 0


@given(strategies.param_shapes(), strategies.schedules())
def test_shapes_and_schedules_keep_their_limits(shape, schedule):
    assert 1 <= len(shape) <= 3
    assert 0 <= shape[0] <= 13
    assert 1 <= len(schedule) <= 6
    assert schedule.endswith("F")
    assert set(schedule) <= set("NRF")


def test_the_odd_ones_are_drawn():
    for mesh in [(1,), (8,), (1, 5), (5, 1), (2, 3), (2, 4)]:
        assert find(strategies.meshes(), lambda drawn, wanted=mesh: drawn == wanted) == mesh
    assert find(strategies.param_shapes(), lambda shape: shape[0] == 0) == (0,)
    assert find(strategies.schedules(), lambda s: s.startswith("RN"))[:2] == "RN"
    assert find(strategies.divide_factors(), lambda factor: factor == "S") == "S"


@given(st.data())
def test_a_usage_mask_has_an_entry_per_microbatch_rank_and_parameter(data):
    mask = data.draw(strategies.usage_masks(num_microbatches=2, num_ranks=3, num_params=4))
    assert (len(mask), len(mask[0]), len(mask[0][0])) == (2, 3, 4)
