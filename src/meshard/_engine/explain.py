"""The explanation that meshard adds to torch's "got mixed torch.Tensor and DTensor".

A parameter was read while its module held a shard. torch raises this where no code of meshard runs.
So the explanation is added when the error leaves the forward of a unit, or ends the program.
"""

from __future__ import annotations

import functools
import sys
from types import TracebackType

from meshard._engine.unit import Unit
from meshard._torch.user_line import listed

_OF_TORCH = "got mixed torch.Tensor and DTensor"
_REMEDIES = (
    "Outside of the forward and backward of their unit, parameters are shards. What helps:\n"
    "* Call the module that fully_shard was applied to, and not one inside it. Where its parent "
    "reads its parameters, as nn.MultiheadAttention does, apply fully_shard to the parent instead, "
    "or pass unshard_on_access=True for this module.\n"
    "* For another method than forward: meshard.register_fsdp_forward_method(module, name).\n"
    "* Anywhere else, as in a loss function: with meshard.unsharded_params(module): around the "
    "read.\n"
    "An input that is a DTensor needs to_local() or full_tensor()."
)


def explain(error: BaseException | None, unit: Unit) -> None:
    """If ``error`` is about mixed tensors and DTensors, add which units are sharded, and help."""
    units = [each for each in unit.lifecycle.units() if each.params and each.group.holds_shards]
    if units:
        _add(error, f"Units that are sharded now: {listed([each.label for each in units])}. ")


@functools.cache
def explain_uncaught() -> None:
    """Install an excepthook that explains the error when it ends the program."""
    previous = sys.excepthook

    def explain_first(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        _add(error, "")
        previous(kind, error, trace)

    sys.excepthook = explain_first


def _add(error: BaseException | None, which: str) -> None:
    # Not with add_note(), which needs Python 3.11. Also, str(error) in a log leaves out notes.
    if error is not None and _OF_TORCH in str(error) and _REMEDIES not in str(error):
        error.args = (f"{error}\n\n{which}{_REMEDIES}", *error.args[1:])
