"""The pages for users of FSDP1 and fairscale: they name everything that these take."""

import inspect
import re

from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.api import ShardingStrategy, StateDictType

from tests import ROOT

CELL = re.compile(r"^\| ([^|]+) \|", re.MULTILINE)


def first_column(page):
    """Return the names in the first column of every table."""
    return set(re.findall(r"`(\w+)", " ".join(CELL.findall(page))))


def asked_of(cls):
    return {name for name in inspect.signature(cls).parameters if not name.startswith("_")}


def test_every_argument_and_every_choice_of_fsdp1_has_a_row():
    rows = first_column((ROOT / "docs" / "migrate" / "from-fsdp1.md").read_text())
    asked = asked_of(FullyShardedDataParallel) | asked_of(MixedPrecision)
    asked |= {choice.name for kind in (ShardingStrategy, StateDictType) for choice in kind}
    assert len(asked) > 20 and sorted(asked - rows) == []


# Of version 0.4.13, the last.
FAIRSCALE = """
    module process_group process_group_reduce_scatter reshard_after_forward disable_reshard_on_root
    mixed_precision fp32_reduce_scatter flatten_parameters move_params_to_cpu compute_dtype
    buffer_dtype move_grads_to_cpu bucket_cap_mb compute_device no_broadcast_optim_state
    state_dict_device clear_autocast_cache force_input_to_fp32 verbose cpu_offload offload_config
    state_dict_on_rank_0_only gradient_predivide_factor
"""


def test_every_argument_of_fairscale_has_a_row():
    rows = first_column((ROOT / "docs" / "migrate" / "from-fairscale.md").read_text())
    assert sorted(set(FAIRSCALE.split()) - rows) == []
