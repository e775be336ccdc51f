"""How many collectives norms take."""

import math

import meshard
from meshard import CommLedger
from tests.clipping.test_norms import NORMS, make
from tests.mesh.tensor_parallel import build, cut, meshes
from tests.mesh.test_tensor_parallel import loss_of
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks


@on_ranks(4)
def test_a_norm_takes_one_gather_for_each_mesh():
    for norm_type in NORMS:
        model, _ = make()
        with CommLedger() as ledger:
            meshard.get_total_norm([p.grad for p in model.parameters()], norm_type)
        assert ledger.counts == {"all_gather": 2}  # one per distinct mesh


@on_ranks(4)
def test_a_norm_over_cut_parameters_takes_one_gather_for_each_mesh():
    data, tp = meshes("dp")
    model = cut(build(), tp, "sequence")
    shard_blocks(model, data, ignored_params={model.outlet.weight})
    loss_of(model, 0).backward()
    for norm_type in (1, 2.0, math.inf):
        with CommLedger() as ledger:
            meshard.get_total_norm([p.grad for p in model.parameters()], norm_type)
        assert ledger.counts == {"all_gather": 2}  # of dp, and of tp
