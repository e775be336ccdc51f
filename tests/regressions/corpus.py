"""Programs of users in which something was wrong once: see ``tests.support.programs``.

A random program that fails comes here when its fault is mended, as short as ``run`` makes it, under
a name that says what must hold. The names of those that still fail are in ``UNMENDED``.
"""

from tests.support.programs import Layout, Microbatch, Program

NESTED = (("blocks.0.inner", None), ("blocks.0", None), ("blocks.1", True))
BLOCKS = (("blocks.0", None), ("blocks.1", True))
FLAT = Layout((2,), BLOCKS)
HYBRID = Layout((2, 2), BLOCKS)
ONE_SHARD = Layout((2, 1), BLOCKS)
KEPT = Layout((2,), (("blocks.0", False), ("blocks.1", False)), reshard=False)

N, R, F = (Microbatch(mode) for mode in "NRF")
N_MORE, R_MORE, F_MORE = (Microbatch(mode, is_last=False) for mode in "NRF")
STEP, DROP = ("step",), ("zero", "none")
SKIPS = (2, 1, 0, 3)

PROGRAMS = {
    # --- windows of which a part failed --------------------------------------------------------
    "zero_grad between the microbatches of a window drops it, one shard": Program(
        (R_MORE, ("zero", "module"), ("clip",), STEP, ("save",), R_MORE, F), layout=ONE_SHARD
    ),
    "the divide factor may change after a window that failed": Program(
        (R_MORE, Microbatch(fails=("forward", 1)), ("factor", 8.0), F, STEP), layout=HYBRID
    ),
    "the divide factor is forgotten with the gradients that it divided": Program(
        (("factor", 8.0), R_MORE, Microbatch("R", fails=("backward", 1)), ("factor", 1.0), F),
        layout=HYBRID,
    ),
    "what finalize_gradients has reduced is dropped by a failure only with its window": Program(
        (N_MORE, ("finalize",), Microbatch(fails=("forward", 0)), F, STEP), layout=HYBRID
    ),
    "a checkpoint after a failed backward drops what is left of it": Program(
        (R_MORE, Microbatch(fails=("backward", 1)), ("save",), F, STEP, ("load",), F),
        layout=HYBRID,
    ),
    "a unit that an interrupted forward has run is reduced once by the next": Program(
        (Microbatch(fails=("forward", 1)), F, STEP, Microbatch(fails=("forward", 2)), F),
        layout=Layout((2,), NESTED),
    ),
    # --- windows -------------------------------------------------------------------------------
    "a divide factor with a partial on two axes": Program((("factor", 8.0), R, F), layout=HYBRID),
    "a window ends with its last backward, not with the first FULL one": Program(
        (F_MORE, ("factor", 8.0), F_MORE, F, ("factor", 8.0), DROP, F), layout=FLAT
    ),
    "a window that zero_grad has emptied is over": Program(
        (N, DROP, ("factor", 8.0), F, STEP), layout=HYBRID
    ),
    "microbatches that reduce to different degrees, in two modes at a time": Program(
        (
            Microbatch("R", "N", skips=SKIPS, twice=True, is_last=False),
            Microbatch(skips=SKIPS, between="evaluation"),
            Microbatch(skips=SKIPS),
            STEP,
            DROP,
        )
        * 2,
        layout=Layout((2, 2), NESTED),
        checkpoints=(None, True),
        policy="bfloat16, added in float32",
        momentum=0.5,
    ),
    "a parameter that is thawed inside a window, beside other dtypes": Program(
        (N_MORE, ("train", "blocks.0.inner.up.weight", True), F, STEP),
        layout=FLAT,
        has_many_dtypes=True,
        frozen=("blocks.0.inner.up.weight",),
    ),
    "a frozen parameter's dtype takes no part in sums": Program(
        (R_MORE, F, STEP),
        layout=Layout((2, 2), NESTED),
        has_many_dtypes=True,
        frozen=("blocks.0.experts.0.bias", "inlet.weight"),
    ),
    "gradients that the user replaced or doubled are added to": Program(
        (
            F,
            ("edit", "double", "blocks.0.inner.up.bias"),
            ("edit", "replace", "blocks.0.inner.down.weight"),
            ("edit", "own", "blocks.0.experts.1.bias"),
            F,
            STEP,
        ),
        layout=HYBRID,
    ),
    "shards in host memory accumulate like others": Program(
        (R_MORE, N_MORE, F, STEP, DROP, F), layout=HYBRID, offloads=True
    ),
    # --- weights that stay unsharded -----------------------------------------------------------
    "an evaluation sees what was loaded since weights were kept": Program(
        (("evaluate", "no_grad"), ("save",), F, STEP, ("load",), ("evaluate", "no_grad"), F),
        layout=KEPT,
    ),
    "unshard() after a forward that has kept its units": Program(
        (Microbatch(between="unused forward"), ("reshard", 0, True), F, STEP, F), layout=KEPT
    ),
    "unshard() between a forward and its backward": Program(
        (Microbatch(between="unshard"), STEP, ("keep", True, True), Microbatch(between="unshard")),
        layout=Layout((2,), NESTED),
    ),
    "units that keep a part of their neighbours reshard as before": Program(
        (Microbatch(twice=True), STEP, Microbatch(skips=SKIPS), STEP),
        layout=Layout((4,), (("blocks.0", 2), ("blocks.1", True)), reshard=2),
    ),
    "an evaluation under inference_mode before anything else": Program(
        (("evaluate", "inference_mode"), ("copy", True), F, STEP), layout=FLAT
    ),
    # --- recomputation -------------------------------------------------------------------------
    "a recomputation belongs to the forward whose backward runs": Program(
        (Microbatch(twice=True, between="unused forward"), STEP) * 2,
        layout=Layout((2,), NESTED),
        checkpoints=(False, True),
    ),
    "a reentrant recomputation where ranks skip different experts": Program(
        (Microbatch(skips=SKIPS, twice=True), STEP, Microbatch("N"), Microbatch(skips=SKIPS)),
        layout=Layout((4,), NESTED),
        checkpoints=(True, True),
    ),
    # --- copies, optimizers, replicas ----------------------------------------------------------
    "a copy has no gradients and trains on": Program(
        (F, STEP, DROP, ("copy", True), F, STEP, ("copy", False), F), layout=FLAT, momentum=0.5
    ),
    "a model that is sharded again on another mesh goes on": Program(
        (F, STEP, ("shard_again", Layout((4, 1), BLOCKS)), R_MORE, F, STEP), layout=HYBRID
    ),
    "a local optimizer loads what others have saved": Program(
        (F, STEP, DROP, ("save_full",), ("save_optimizer",), F, STEP),
        layout=HYBRID,
        optimizer="local",
        momentum=0.5,
    ),
    "a step in backward counts right after a parameter is frozen": Program(
        (F, ("train", "blocks.0.inner.up.weight", False), F, N, F),
        layout=FLAT,
        optimizer="overlap",
        momentum=0.5,
    ),
    "steps in backward of buckets that were rebuilt": Program(
        (F, N, F, ("train", "outlet.bias", False), F),
        buckets=(3e-5, True),
        optimizer="overlap",
    ),
    "a recomputation rebuilds no bucket": Program(
        (Microbatch(skips=SKIPS), STEP, Microbatch(twice=True, skips=SKIPS), STEP),
        buckets=(3e-5, True),
        checkpoints=(True, False),
    ),
    "buckets of several dtypes, some of whose gradients the user replaced": Program(
        (F, ("edit", "replace", "blocks.0.inner.down.weight"), N, F, STEP),
        buckets=(3e-5, False),
        has_many_dtypes=True,
    ),
    "a failed backward of replicas leaves the next one alone": Program(
        (N, Microbatch(fails=("backward", 1)), F, STEP), buckets=(3e-5, True)
    ),
}

UNMENDED: dict[str, str] = {}
