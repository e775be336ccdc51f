"""Situations in which torch's fully_shard is wrong or fails, and the tests that show ours.

Data only: ``tests/house/test_behaviours.py`` holds that every test named here exists. Paths begin
below ``tests/``; in brackets is the row of that file's ``ROWS`` under whose name the test runs.
"""

from dataclasses import dataclass

_GRADIENTS = "peers/test_peer_gradients.py::test_the_peer_beside_us"
_STATE = "peers/test_peer_state.py::test_the_peer_beside_us"
_USE = "peers/test_peer_use.py::test_the_peer_beside_us"


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """One situation, the tests that show ours, and those that run the peer beside it."""

    situation: str
    ours: tuple[str, ...] = ()
    peer: tuple[str, ...] = ()
    no_peer: str = ""  # why the peer is not run


def _rows(test: str, *names: str) -> tuple[str, ...]:
    """Name rows of ``test``, which runs both: the peer, and ours beside it."""
    return tuple(f"{test}[{name}]" for name in names)


SILENT = (
    Behaviour(
        situation="ranks use different parameters of one unit",
        ours=(
            "peers/test_peer_gradients.py::test_ranks_that_use_different_parameters",
            "gradients/test_used_params.py::test_ranks_that_use_different_parameters_of_the_same_size_stay_apart",
            "gradients/test_used_params.py::test_any_window_leaves_the_right_sums_and_sends_the_same_on_all_ranks",
        ),
        peer=(
            "peers/test_peer_gradients.py::"
            "test_the_peer_mixes_parameters_of_different_ranks_up_or_dies",
        ),
    ),
    Behaviour(
        situation="ranks run different units",
        ours=("comm/test_debug.py::test_ranks_that_run_different_units_are_told_which",),
        no_peer="it waits in the backend for the timeout of the process group, or adds up what "
        "does not belong together, as its units happen to have the same size or not",
    ),
    Behaviour(
        situation="shards edited after an evaluation that left the root whole",
        ours=(
            "api/test_state.py::"
            "test_edits_of_shards_reach_a_forward_that_would_reuse_whole_parameters",
            "engine/test_moving_averages.py::test_averages_may_be_swapped_in_for_an_evaluation",
        ),
        peer=_rows(
            _STATE,
            "averages_swapped_in_after_an_evaluation",
            "stepped_after_an_evaluation",
            "initialised_after_an_evaluation",
        ),
    ),
    Behaviour(
        situation="optimizer built before fully_shard",
        ours=(
            "engine/test_stale_optimizers.py::test_an_optimizer_built_before_fully_shard_is_told_so",
            "engine/test_stale_optimizers.py::test_one_parameter_of_before_among_others_is_found",
        ),
        peer=(
            "engine/test_stale_optimizers.py::test_an_optimizer_built_before_fully_shard_is_told_so",
        ),
    ),
    Behaviour(
        situation="optimizer built after an evaluation",
        ours=(
            "engine/test_stale_optimizers.py::test_an_optimizer_built_after_an_evaluation_trains",
        ),
        peer=_rows(_STATE, "an_optimizer_built_after_an_evaluation"),
    ),
    Behaviour(
        situation="zero_grad() while gradients are held that are not reduced",
        ours=("accumulation/test_accumulation.py::test_zero_grad_clears_what_is_hidden",),
        peer=_rows(_GRADIENTS, "zero_grad_in_window"),
    ),
    Behaviour(
        situation="requires_grad toggled while whole, or thawed under mixed precision",
        ours=(
            "gradients/test_used_params.py::test_parameters_may_be_frozen_and_thawed_between_steps",
            "api/test_mixed_precision.py::"
            "test_sums_stay_wide_when_parameters_are_frozen_and_thawed",
        ),
        peer=_rows(
            _STATE,
            "frozen_between_steps",
            "frozen_while_whole",
            "thawed_under_mixed_precision",
            "frozen_under_mixed_precision",
        ),
    ),
    Behaviour(
        situation="a child cast, or a weight assigned, after sharding",
        ours=(
            "api/test_conversions.py::test_a_cast_reaches_the_next_forward",
            "api/test_loading.py::test_a_whole_parameter_that_is_assigned_becomes_a_shard",
        ),
        peer=_rows(_STATE, "parameter_assigned", "part_cast"),
    ),
    Behaviour(
        situation="weight.normal_() on shards of a CPU mesh",
        ours=(
            "initialization/test_materialize.py::test_values_are_bit_for_bit_those_of_one_process",
            "initialization/test_materialize.py::test_any_units_and_shard_dims_give_the_same",
        ),
        peer=(
            "initialization/test_materialize.py::test_the_peer_draws_the_same_shard_on_every_rank",
        ),
    ),
    Behaviour(
        situation="each rank starts from different weights",
        ours=(
            "initialization/test_same_start.py::test_sync_init_gives_every_rank_the_values_of_the_first",
            "initialization/test_same_start.py::test_different_values_are_refused_and_named",
        ),
        peer=(
            "initialization/test_same_start.py::test_without_it_values_are_stitched_like_the_peers",
            *_rows(_USE, "replicas_that_start_apart"),
        ),
    ),
    Behaviour(
        situation="setters on a root whose children own everything",
        ours=(
            "api/test_controls.py::test_setters_recurse_unless_told_not_to",
            "gradients/test_reduce_hooks.py::test_the_all_reduce_hook_of_a_root_reaches_the_units_inside",
        ),
        peer=_rows(_USE, "a_factor_on_a_root_without_parameters"),
    ),
    Behaviour(
        situation="late set_reduce_scatter_max_input_buffers",
        ours=("comm/test_comm_controls.py::test_inputs_of_reductions_are_no_more_than_allowed",),
        peer=_rows(_USE, "a_late_limit_of_input_buffers"),
    ),
)

FAILS = (
    Behaviour(
        situation="uneven sharding on a dim other than 0",
        ours=(
            "mesh/test_placements.py::test_dims_that_nothing_divides_train_like_one_process",
            "api/test_loading.py::test_whole_tensors_are_cut_on_any_dim",
        ),
        peer=(
            "mesh/test_placements.py::test_torch_shards_dim_1_evenly_only",
            *_rows(_GRADIENTS, "uneven_on_dim_one"),
        ),
    ),
    Behaviour(
        situation="an int for reshard_after_forward together with Shard(1)",
        ours=("mesh/test_placements.py::test_dims_that_nothing_divides_train_like_one_process",),
        peer=("mesh/test_placements.py::test_torch_keeps_no_neighbours_of_dim_1",),
    ),
    Behaviour(
        situation="parameters of several dtypes in one unit",
        ours=("api/test_parity.py::test_float_training_agrees_to_rounding",),
        peer=(
            *_rows(_GRADIENTS, "mixed_dtypes_in_a_unit"),
            *_rows(
                _USE,
                "an_adapter_beside_a_narrow_base",
                "an_adapter_beside_a_narrow_base_that_trains",
            ),
        ),
    ),
    Behaviour(
        situation="copy.deepcopy, moving averages",
        ours=(
            "engine/test_deepcopy.py::test_a_copy_trains_by_itself",
            "engine/test_moving_averages.py::test_a_moving_average_follows_and_is_evaluated",
        ),
        peer=_rows(_STATE, "copied", "averaged"),
    ),
    Behaviour(
        situation="set_gradient_divide_factor on gloo",
        ours=(
            "gradients/test_divide_factor.py::test_a_divide_factor_may_be_read_at_each_reduction",
        ),
        peer=_rows(_GRADIENTS, "divide_by_three"),
    ),
    Behaviour(
        situation="clipping across meshes and parameters on none",
        ours=(
            "clipping/test_norms.py::test_norms_over_mixed_meshes_equal_those_of_whole_gradients",
        ),
        peer=_rows(_USE, "norms_over_meshes"),
    ),
    Behaviour(
        situation="a submodule run first and the parent later",
        ours=("engine/test_recompute.py::test_units_may_run_before_their_root_is_sharded",),
        peer=_rows(_STATE, "a_part_first"),
    ),
    Behaviour(
        situation="module.forward(x) called directly",
        ours=(
            "api/test_forward_methods.py::test_whatever_is_called_trains_like_the_plain_model",
            "api/test_forward_methods.py::"
            "test_a_direct_call_communicates_and_casts_like_a_call_of_the_module",
        ),
        peer=("api/test_forward_methods.py::test_the_peer_still_refuses_a_direct_forward",),
    ),
    Behaviour(
        situation="a registered forward method that calls the module",
        ours=("api/test_forward_methods.py::test_whatever_is_called_trains_like_the_plain_model",),
        peer=_rows(_USE, "a_method_that_calls_the_module"),
    ),
    Behaviour(
        situation="load_state_dict of whole tensors, also with assign=True",
        ours=(
            "api/test_loading.py::test_whole_tensors_are_loaded_without_communication",
            "api/test_loading.py::test_a_model_on_meta_is_filled_by_assigning",
        ),
        peer=_rows(_STATE, "loaded_from_whole_tensors", "assigned_from_whole_tensors"),
    ),
    Behaviour(
        situation="inference_mode first, training later",
        ours=("engine/test_recompute.py::test_training_follows_inference_mode",),
        peer=_rows(_STATE, "inference_first"),
    ),
    Behaviour(
        situation="double backward",
        ours=(
            "engine/test_double_backward.py::test_gradients_of_gradients_agree_with_one_process",
            "engine/test_double_backward.py::test_gradients_of_gradients_whenever_units_reshard",
        ),
        peer=(
            "engine/test_double_backward.py::test_the_peer_has_freed_what_the_second_backward_reads",
        ),
    ),
    Behaviour(
        situation="torch.autograd.grad by sharded parameters",
        ours=("peers/test_peer_use.py::test_we_are_right",),
        peer=_rows(_USE, "gradients_by_autograd_grad"),
    ),
    Behaviour(
        situation="fully_shard on a child after its parent",
        ours=("api/test_bad_input.py::test_a_child_after_its_parent_is_refused",),
        peer=_rows(_USE, "a_child_after_its_parent"),
    ),
    Behaviour(
        situation=".to(dtype) after a forward",
        ours=(
            "api/test_state.py::test_a_model_is_cast_after_a_step",
            "api/test_conversions.py::test_a_cast_of_the_shards_leaves_the_compute_dtype",
        ),
        peer=_rows(_STATE, "cast_after_an_evaluation", "cast_and_cast_back_after_an_evaluation"),
    ),
    Behaviour(
        situation="parameters that are not contiguous, channels_last",
        ours=("api/test_conversions.py::test_parameters_of_any_memory_format_are_sharded",),
        peer=_rows(_STATE, "channels_last"),
    ),
    Behaviour(
        situation="scalar parameters",
        ours=("api/test_bad_input.py::test_a_scalar_parameter_is_refused_and_named",),
        peer=_rows(_USE, "a_scalar_parameter"),
    ),
    Behaviour(
        situation="tensors that require gradients inside objects of the user's",
        ours=(
            "engine/test_outputs.py::test_units_may_return_any_container",
            "engine/test_outputs.py::test_units_that_return_nothing_stay_whole_and_say_so",
        ),
        peer=("engine/test_outputs.py::test_the_peer_has_freed_what_it_does_not_find",),
    ),
)

READS = (
    Behaviour(
        situation="a weight read outside the forward of its unit: the error",
        ours=(
            "engine/test_misread.py::test_an_attention_whose_out_proj_is_a_unit_says_what_helps",
            "engine/test_misread.py::test_a_parameter_that_a_local_variable_holds_is_named",
            "engine/test_misread.py::test_of_other_reads_the_sharded_units_inside_are_named",
        ),
        peer=("engine/test_misread.py::test_the_peer_names_no_parameter",),
    ),
    Behaviour(
        situation="a weight read outside the forward of its unit: what helps",
        ours=(
            "engine/test_misread.py::test_a_loss_that_reads_the_head_trains_inside_unsharded_params",
            "api/test_forward_methods.py::test_whatever_is_called_trains_like_the_plain_model",
            "engine/test_on_access.py::test_an_attention_whose_out_proj_is_a_unit_trains",
            "engine/test_on_access.py::test_what_was_read_is_given_back_with_the_parent",
            "api/test_auto_units.py::test_attention_may_be_inside_units_or_be_one",
        ),
        no_peer="it has neither unsharded_params nor unshard_on_access",
    ),
)

BEHAVIOURS = SILENT + FAILS + READS
