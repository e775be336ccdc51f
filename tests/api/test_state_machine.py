"""A state machine of what users do, which chooses the next operation by the state.

It plays the operations of ``tests.support.programs`` beside their oracle, which also shortens what
has failed.
"""

import dataclasses

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.api.rank_session import RankSession
from tests.support.programs import FREEZABLE, Player, microbatches, others, programs, run


class Machine(RuleBasedStateMachine):
    """One model on threads, beside the exact one."""

    session = None

    @initialize(program=programs(max_operations=0))
    def shard(self, program):
        self.program, self.is_open = program, False
        self.session = RankSession(program.num_ranks, lambda: Player(program))

    def play(self, *operation):
        self.play_one(operation)

    def play_one(self, operation):
        place = len(self.program.operations)
        operations = (*self.program.operations, operation)
        self.program = dataclasses.replace(self.program, operations=operations)
        try:
            self.session.do(lambda player: player.play(place, operation))
        except BaseException:
            self.session.close()
            run(self.program)  # fails too, and shortens the program
            raise

    @rule(microbatch=microbatches())
    def microbatch(self, microbatch):
        self.is_open = True
        self.play_one(microbatch)

    @precondition(lambda self: self.is_open)
    @rule(microbatch=microbatches(may_fail=True))
    def microbatch_that_may_raise(self, microbatch):
        self.play_one(microbatch)

    @precondition(lambda self: self.is_open)
    @rule()
    def step(self):
        self.play("step")

    @precondition(lambda self: self.is_open)
    @rule(how=st.sampled_from(["module", "none", "zeros"]))
    def zero_grad(self, how):
        self.is_open = False
        self.play("zero", how)

    @rule(name=st.sampled_from(FREEZABLE), trains=st.booleans())
    def freeze(self, name, trains):
        self.play("train", name, trains)

    @rule(operation=st.deferred(others))  # not drawn from before the test runs
    def other(self, operation):
        self.play_one(operation)

    @precondition(lambda self: ("save",) in self.program.operations)
    @rule()
    def load(self):
        self.play("load")

    def teardown(self):
        if self.session is not None:
            if not self.session.has_failed:
                self.session.do(Player.check)  # waits for what is on its way
            self.session.close()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    stateful_step_count=12, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
TestMachine.pytestmark = [pytest.mark.slow]
