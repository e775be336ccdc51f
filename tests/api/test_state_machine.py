"""A state machine of what users do, against an exact model.

The rules are those of ``tests.support.scripts``, and what only a machine that sees the state can
choose: to load what was saved earlier. Hypothesis shrinks a failure to the rules that it needs.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import meshard
from tests.support.rank_session import RankSession
from tests.support.scripts import PARAMS, Player

MAX_RANKS = 4
MASKS = st.tuples(*[st.tuples(*[st.booleans()] * len(PARAMS))] * MAX_RANKS)


class SavingPlayer(Player):
    """A player that can come back to a state dict."""

    def do_save(self, place):
        meshard.pending_gradients(self.net)  # finishes what is on its way
        if self.refused(self.net.state_dict):
            assert self.model.is_open
            return
        assert not self.model.is_open
        state = self.net.state_dict()
        self.saved = {name: value.clone() for name, value in state.items()}
        self.saved_values = list(self.model.values)

    def do_load(self, place):
        if not hasattr(self, "saved"):
            return
        self.net.load_state_dict(self.saved)
        self.model.values = list(self.saved_values)


class Machine(RuleBasedStateMachine):
    """One model on threads, beside the exact one."""

    session = None

    @initialize(mesh=st.sampled_from([(1,), (2,), (3,), (2, 2), (4, 1), (1, 2), (2, 1)]))
    def shard(self, mesh):
        num_ranks = mesh[0] * (mesh[1] if len(mesh) == 2 else 1)
        self.place, self.has_saved, self.num_ranks = 0, False, num_ranks
        self.session = RankSession(num_ranks, lambda: SavingPlayer(mesh))

    def play(self, *operation):
        place = self.place
        self.place += 1
        self.session.do(lambda player: player.play(place, operation))

    @rule(mode=st.sampled_from("NRFF"), masks=MASKS)
    def microbatch(self, mode, masks):
        self.play("microbatch", mode, masks[: self.num_ranks], False)

    @rule(mode=st.sampled_from("NRF"), masks=MASKS)
    def microbatch_that_raises(self, mode, masks):
        self.play("microbatch", mode, masks[: self.num_ranks], True)

    @rule(how=st.sampled_from(["module", "none", "zeros"]))
    def zero_grad(self, how):
        self.play("zero", how)

    @rule()
    def step(self):
        self.play("step")

    @rule(factor=st.sampled_from([1.0, 0.5, 8.0]))
    def set_factor(self, factor):
        self.play("factor", factor)

    @rule(param=st.sampled_from(range(len(PARAMS))), frozen=st.booleans())
    def freeze(self, param, frozen):
        self.play("freeze" if frozen else "thaw", param)

    @rule()
    def evaluate(self):
        self.play("evaluate")

    @rule(unit=st.sampled_from([0, 1]), how=st.sampled_from(["unshard", "reshard"]))
    def gather(self, unit, how):
        self.play(how, unit)

    @rule(keep=st.booleans())
    def keep_whole(self, keep):
        self.play("keep", keep)

    @rule(is_last=st.booleans())
    def is_last_backward(self, is_last):
        self.play("last", is_last)

    @rule()
    def finalize(self):
        self.play("finalize")

    @rule()
    def save(self):
        self.has_saved = True
        self.play("save")

    @precondition(lambda self: self.has_saved)
    @rule()
    def load(self):
        self.play("load")

    def teardown(self):
        if self.session is not None:
            self.session.close()


TestMachine = Machine.TestCase
TestMachine.settings = settings(stateful_step_count=12)
TestMachine.pytestmark = [pytest.mark.slow]
