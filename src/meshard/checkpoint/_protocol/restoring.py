"""One load: from a manifest to a model, optimizers and what users pass along.

First every part tells which tensors of the checkpoint go where. Then all tensors are read. Then
each part takes the rest of its state.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshard._torch.dtensor import place_like, plain_of
from meshard._torch.private import dtype_of
from meshard.checkpoint._protocol import parts
from meshard.checkpoint._protocol.loading import Read, Reader, check, compare, fill, reads_of
from meshard.checkpoint._protocol.manifest import (
    TensorEntry,
    own_name,
    own_part,
    with_own_names,
)
from meshard.checkpoint._protocol.parts import (
    MODEL,
    OPTIMIZER,
    RANDOM,
    ModelState,
    join,
    model_state,
    placed_like,
)
from meshard.checkpoint._protocol.plain import decode, encoded_items, names_in, reference
from meshard.checkpoint._protocol.ranks import Ranks
from meshard.checkpoint._protocol.storage import CheckpointError


class Loaded(NamedTuple):
    """What ``Checkpointer.load`` has found."""

    step: int | None  # None: saved by torch, without a step
    extra: dict[str, Any]  # plain values, and tensors that `load` was not given, by name
    # Names that were asked for and are not in the checkpoint, or are in ``unreadable``. Also texts
    # about parts that each rank saved for itself, if there are now more or fewer ranks than then:
    # for example "loader was saved by each of 4 ranks for itself, and there are 2 here".
    missing: list[str]
    unexpected: list[str]  # names in the parts that were asked for, and not here
    random: str  # "restored", "derived" (from states of other ranks) or "absent"
    # Names of objects that ``torch.distributed.checkpoint.save`` has written, and that were not
    # read, because unpickling them needs classes that ``load`` refuses.
    unreadable: list[str]


class Options(NamedTuple):
    """How to load."""

    strict: bool
    cast: bool
    verify: bool
    advance: Callable[[int], Any]  # called with bytes that were checked or read


class Restoring:
    """One load of one rank."""

    def __init__(self, ranks: Ranks, reader: Reader, where: str, options: Options) -> None:
        self._ranks, self._reader, self._where = ranks, reader, where
        self._options = options
        # Whether there are as many ranks as in the save, so that each has its own again.
        self._has_own = reader.manifest.num_ranks == ranks.size
        self._manifest = reader.manifest
        if self._has_own:
            self._manifest = with_own_names(self._manifest, ranks.rank)
        self._targets: dict[str, torch.Tensor] = {}  # by the name in the checkpoint
        self._filled: set[int] = set()  # where the memory of each target begins
        self._here: set[str] = set()  # names of the tensors of this rank's parts
        self._deferred: list[Callable[[], object]] = []  # called once all tensors are read
        self._extra: dict[str, Any] = {}
        self._missing: list[str] = []
        self._left_out: list[str] = []  # texts about plain values that were not asked for
        self._unexpected: list[str] = []
        self._problems: list[str] = []
        # What names begin with that a rank has saved for itself: "rank1/optimizer.state.weight."
        self._heads_of_own = {
            head
            for each in self._manifest.tensors
            if "/" in each
            for head in itertools.accumulate(each.split("."), "{}.{}".format)
        }
        self._random: Any = None  # the random state of this rank
        self._how_random = ""  # what was done with it

    def run(
        self,
        model: nn.Module | dict[str, Any],
        optimizer: Optimizer | None,
        extra: dict[str, Any],
    ) -> Loaded:
        """Load.

        **Collective:** all ranks.

        Raises:
            CheckpointError: On all ranks.
        """
        advance, what = self._options.advance, f"{self._where} does not load here"

        def prepare() -> list[str]:
            try:
                self._prepare(model, optimizer, extra)
            except Exception as error:  # raised below, with all else that is wrong
                self._problems.append(f"{type(error).__name__}: {error}")
            return self._unexpected

        def checked() -> list[Read]:
            if self._options.strict:
                self._problems += self._hint_at_key()
                self._problems += map(self._lack_of, self._missing)
                self._problems += [
                    f"{name} is in the checkpoint, and not here" for name in self._unexpected
                ]
            if self._problems:
                raise CheckpointError(*self._problems)
            reads = reads_of(self._manifest, self._targets)
            if self._options.verify:
                check(self._reader, reads, advance)
            return reads

        def filled() -> None:
            self._raise_versions()
            fill(self._reader, reads, advance)

        def restored() -> None:
            for call in (*self._deferred, self._restore_random):
                call()

        # Unexpected is what no rank expects: stages of a pipeline differ.
        common = self._ranks.together(what, prepare, lambda all: set.intersection(*map(set, all)))
        self._unexpected = [name for name in self._unexpected if name in common]
        reads = self._ranks.each(f"{what} (nothing was loaded)", checked)
        outcome = "a file could not be read any more, so the model is loaded in part; load again"
        self._ranks.each(f"{what} ({outcome})", filled)
        outcome = "a part did not take its state, so that others are loaded and it is not"
        self._ranks.each(f"{what} ({outcome})", restored)
        return Loaded(
            self._manifest.step,
            self._extra,
            [*self._missing, *self._left_out],
            self._unexpected,
            self._how_random,
            self._manifest.unreadable,
        )

    def _raise_versions(self) -> None:
        """Let every rank notice that its shards change, also one that has no element of them.

        Where a unit is unsharded, its next forward gathers again if the version of its shards has
        changed, and all ranks must do so.
        """
        increment_version(
            [plain_of(each) for each in self._targets.values() if isinstance(each, DTensor)]
        )

    def _hint_at_key(self) -> list[str]:
        """Say under which key torch has saved what is missing, as in ``{"app": app}``."""
        if not self._manifest.has_each_name or not self._missing:
            return []
        if any(each.startswith(f"{MODEL}.") for each in self._manifest.tensors):
            return []  # the model is there, and lacks something
        end = "." + self._missing[0].removeprefix(f"{MODEL}.")
        saved = next((each for each in self._manifest.tensors if each.endswith(end)), "")
        key = saved.split(".")[0]
        if not saved or key in parts.RESERVED:
            return []
        return [
            f"{self._missing[0]} was saved as {saved}; call load(torch.nn.Module(), {key}=...), "
            f"with what has the state that was saved under {key!r}"
        ]

    def _lack_of(self, name: str) -> str:
        """Say that a name is missing. It may be that of an optimizer that is there as another."""
        if own_name(0, name) in self._manifest.tensors:
            return self._other_ranks_had(name)
        text = f"{name} is not in the checkpoint"
        others = [key for key, part in self._manifest.parts.items() if "param_groups" in part]
        if name != OPTIMIZER or not others:
            return text
        return f"{text}, but {others[0]} is, an optimizer: call load(model, {others[0]}=optimizer)"

    # --- parts -----------------------------------------------------------------------------

    @torch.inference_mode(False)  # the run may go on, so its states are no inference tensors
    @torch.no_grad()  # inference_mode(False) alone would enable gradients
    def _prepare(
        self,
        model: nn.Module | dict[str, Any],
        optimizer: Optimizer | None,
        extra: dict[str, Any],
    ) -> None:
        parts.check_names(extra)
        self._random = self._read_random()
        names, further = self._add_module(MODEL, model), dict[int, str]()
        for name, value in extra.items():
            if isinstance(value, nn.Module):
                inner = self._add_module(name, value)
                further |= {key: join(name, fqn) for key, fqn in inner.items()}
        names = self._as_saved({**further, **names})  # as ``job_of`` names them
        if optimizer is not None:
            self._add_optimizer(OPTIMIZER, optimizer, names)
        given: dict[str, dict[str, torch.Tensor]] = {}  # tensors among plain values, by name
        for name, value in extra.items():
            if isinstance(value, nn.Module):
                continue
            if isinstance(value, Optimizer):
                self._add_optimizer(name, value, names)
            elif parts.is_stateful(value):
                self._add_stateful(name, value)
            else:
                given[name] = self._add_value(name, value)
        asked = {MODEL, *extra} if optimizer is None else {MODEL, OPTIMIZER, *extra}
        self._missing += [each for each in self._manifest.unreadable if each.split(".")[0] in asked]
        own = self._manifest.rank_parts
        rank_parts = [name for name in own if self._reader.kind_of(name) == "value"]
        # A plain value is read even if it was not asked for. Any other part is not, as it may be
        # large.
        for name in (*self._manifest.parts, *rank_parts):
            # Whether the code above has given the part to an optimizer, a module, an object with a
            # state, or a tensor in ``extra``.
            is_filled = isinstance(extra.get(name), torch.Tensor) or (
                name in extra and name not in given
            )
            if (
                is_filled
                or name == RANDOM
                or self._manifest.parts.get(name, {}).get("kind") not in (None, "value")
            ):
                continue
            if not self._is_here(name):
                if name not in extra:
                    self._left_out.append(self._other_ranks_had(name))
                continue
            part = self._part(name)
            if isinstance(part, dict) and part.get("kind") == "value":
                try:
                    found = self._decoded_around(name, given.get(name, {}), part["tree"])
                except CheckpointError as error:
                    if name in extra:
                        raise
                    self._left_out.append(str(error))  # it may be of a class of another program
                    continue
                self._extra[name] = found

    def _add_value(self, name: str, value: Any) -> dict[str, torch.Tensor]:
        """Add a tensor, or the tensors in lists and dicts; return them by name."""
        may_have = isinstance(value, (torch.Tensor, list, tuple, dict))
        given = parts.encode_part(name, value).tensors if may_have else {}
        if self._part(name) is None and not given:
            self._missing.append(name)
        self._add_tensors(given, {})
        return given

    def _decoded_around(self, part: str, given: dict[str, torch.Tensor], tree: Any) -> Any:
        """Decode a tree with the ``given`` tensors, which are filled, and new ones elsewhere."""

        def place(name: str) -> torch.Tensor:
            if name in given:
                return given[name]
            made: torch.Tensor = self._decoded(part, reference(name), lambda _: None)
            return made

        with self._naming(part):
            return decode(tree, place)

    def _add_module(self, name: str, module: nn.Module | dict[str, Any]) -> dict[int, str]:
        state = model_state(module)
        tensors = {join(name, key): each for key, each in state.tensors.items()}
        ties = {join(name, key): join(name, tied) for key, tied in state.ties.items()}
        self._add_tensors(tensors, ties)
        others = self._others_of(name, state)
        there = [*self._manifest.tensors, *self._manifest.ties]
        self._unexpected += [
            each for each in sorted(there) if each.startswith(f"{name}.") and each not in self._here
        ]
        if others:
            self._deferred.append(lambda: parts.load_others(module, others))
        return state.names

    def _others_of(self, name: str, state: ModelState) -> dict[str, Any]:
        """Return the extra state of a module. Its tensors are filled later."""
        saved = self._saved_others(name)
        others = {}
        for key, raw in state.raw.items():
            full = join(name, key)
            if key in saved:
                others[raw] = self._decoded(name, saved[key], lambda _: None)
            elif full in self._manifest.tensors:  # torch saves it as any other tensor
                others[raw] = self._decoded(name, reference(full), lambda _: None)
            else:
                self._missing.append(full)
        self._unexpected += [join(name, key) for key in saved if key not in state.raw]
        self._here |= names_in(saved)
        return others

    def _saved_others(self, name: str) -> dict[str, Any]:
        """Return the trees of what was saved of a module beside its tensors."""
        part = self._part(name) or {}
        found = encoded_items(part.get("tree")) if part.get("kind") in ("module", "value") else {}
        # A module's state dict may have been saved as a plain value:
        # ``torch.distributed.checkpoint.save`` tells no modules from dicts. Then the tree has the
        # module's tensors too, which are left out here.
        tensors = self._manifest.tensors if part.get("kind") == "value" else {}
        return {key: each for key, each in found.items() if join(name, key) not in tensors}

    def _add_tensors(self, tensors: dict[str, torch.Tensor], ties: dict[str, str]) -> None:
        """Add tensors to be filled; ``ties`` has their other names."""
        others: dict[str, list[str]] = {}
        for alias, name in ties.items():
            others.setdefault(name, []).append(alias)
        targets = {}
        for name, tensor in tensors.items():
            # A tied tensor may have been saved under another of its names.
            named = [name, *others.get(name, ())]
            self._here.update(named)
            stored = dict.fromkeys(each for each in map(self._stored, named) if each is not None)
            if len(stored) > 1 and not self._manifest.has_each_name:
                self._problems.append(
                    f"{' and '.join(named)} are tied here, and were saved as {len(stored)} tensors"
                )
            found = next((each for each in named if self._stored(each) is not None), name)
            targets[found] = tensor
        fitting, missing, wrong = compare(self._manifest, targets, cast=self._options.cast)
        self._missing += missing
        self._problems += wrong
        self._targets |= fitting
        self._filled |= set(map(_begin_of, fitting.values()))

    def _stored(self, name: str) -> str | None:
        name = self._manifest.ties.get(name, name)
        return name if name in self._manifest.tensors else None

    def _check_is_laid_out_as_saved(
        self, name: str, fqn: str, param: torch.Tensor, meshes: list[list[int]]
    ) -> None:
        """Refuse states that each rank has saved for itself, if it holds another part here."""
        own = own_name(self._ranks.rank, f"{name}.state.{fqn}")
        if not isinstance(param, DTensor) or own not in self._heads_of_own:
            return
        saved = self._placements_of(join(MODEL, fqn)) or self._placements_of(fqn)
        here = list(map(str, param.placements))
        if saved != here or list(param.device_mesh.shape) not in meshes:
            self._problems.append(
                f"each rank has saved its own states of {fqn!r}, of another part of it: it was "
                f"placed {saved} then, and is {here} here"
            )

    def _placements_of(self, name: str) -> list[str]:
        stored = self._stored(name)
        return [] if stored is None else self._manifest.tensors[stored].placements

    def _as_saved(self, names: dict[int, str]) -> dict[int, str]:
        """Return names of parameters, those of tied ones as they were first in the save."""
        present, prefix = set(names.values()), f"{MODEL}."
        found = dict[int, str]()
        for key, fqn in names.items():
            ties = self._manifest.ties
            first = ties.get(prefix + fqn, "").removeprefix(prefix) or ties.get(fqn, fqn)
            found[key] = fqn if first in present else first
            present.add(first)  # of tied ones that are two parameters here, one has the state
        return found

    def _add_optimizer(self, name: str, optimizer: Optimizer, names: dict[int, str]) -> None:
        encoded = self._manifest.parts.get(name)
        if encoded is None:
            self._missing.append(name)
            return
        if "param_groups" not in encoded:
            self._problems.append(f"{name} was not saved as an optimizer, and is one here")
            return
        encoded = parts.with_names(encoded, optimizer, names)
        own: dict[str, torch.Tensor] = {}
        for group in optimizer.param_groups:
            own.update(zip(parts.names_of(group, names, optimizer), group["params"], strict=True))
        # Present state is filled in place if it fits, so that there is no second one in memory.
        present = parts.encode_part(name, parts.optimizer_tree(optimizer, names)).tensors
        state, of_others = {}, frozenset(self._filled)
        meshes = [each["shape"] for each in self._manifest.about.get("meshes", ())]
        for fqn, each in encoded["state"].items():
            if fqn in own:
                self._check_is_laid_out_as_saved(name, fqn, own[fqn], meshes)

                def like(name: str, param: torch.Tensor = own[fqn], fqn: str = fqn) -> torch.Tensor:
                    if name in present:
                        return present[name]
                    was_cut = self._placements_of(join(MODEL, fqn)) or self._placements_of(fqn)
                    # Ordinary tensors beside a parameter that was a DTensor stay ordinary ones.
                    is_local = was_cut and self._stored(name) and not self._placements_of(name)
                    return plain_of(param) if is_local else param

                state[fqn] = self._decoded(name, each, like, of_others)
        referred = Counter(each for group in encoded["param_groups"] for each in names_in(group))
        twice = next((each for each, count in referred.items() if count > 1), None)
        if twice is not None:
            self._problems.append(
                f"several groups of {name} have values of their own of {twice!r}, and only one was "
                "saved (stages of a pipeline, in an older checkpoint); load the model alone"
            )
            return
        others = {key: each for key, each in encoded.items() if key != "state"}
        tree = {**self._decoded(name, others, lambda _: None), "state": state}
        # Hyperparameters may be tensors that are stored apart from the tree, as dcp.save does. They
        # are read now, before the other tensors, because ``numbered`` compares hyperparameters.
        here = names_in(encoded["param_groups"])
        fill(self._reader, reads_of(self._manifest, {n: self._targets[n] for n in here}))
        saved = {fqn for group in tree["param_groups"] for fqn in group["params"]}
        self._missing += [join(name, fqn) for fqn in own if fqn not in saved]
        self._unexpected += [join(name, fqn) for fqn in sorted(saved - own.keys())]
        numbered = parts.numbered(optimizer, names, tree)
        keep = {
            number
            for number, (fqn, param) in enumerate(own.items())
            if (saved_as := self._stored(join(MODEL, fqn)) or self._stored(fqn)) is None
            or dtype_of(self._manifest.tensors[saved_as].dtype) == param.dtype
        }
        self._deferred.append(lambda: parts.load_optimizer(optimizer, numbered, keep))

    def _add_stateful(self, name: str, value: Any) -> None:
        part = self._part(name)
        if part is None:
            self._missing.append(name)
            return
        if part.get("kind") not in ("stateful", "value"):
            kind = type(value).__name__
            self._problems.append(
                f"{name} was saved as a module or optimizer, and is a {kind} here"
            )
            return
        present: dict[str, torch.Tensor] = {}
        if names_in(part["tree"]):
            present = parts.encode_part(name, value.state_dict()).tensors
        tree = self._decoded(name, part["tree"], present.get, frozenset(self._filled))
        self._deferred.append(lambda: value.load_state_dict(tree))

    def _part(self, name: str) -> Any:
        """Return what was saved under a name: for all ranks, or for this one."""
        if name not in self._manifest.parts and name not in self._manifest.rank_parts:
            return None
        if not self._is_here(name):
            text = self._other_ranks_had(name)
            (self._problems if self._options.strict else self._missing).append(text)
            return None
        if name in self._manifest.parts:
            return self._manifest.parts[name]
        return self._reader.tree_of(own_part(self._ranks.rank, name))

    def _is_here(self, name: str) -> bool:
        """Whether a part is there for this rank, and not only for as many ranks as in the save."""
        if name in self._manifest.rank_parts:
            return self._has_own
        return None not in map(self._stored, names_in(self._manifest.parts[name]))

    def _other_ranks_had(self, name: str) -> str:
        return (
            f"{name} was saved by each of {self._manifest.num_ranks} ranks for itself, and "
            f"there are {self._ranks.size} here"
        )

    @contextlib.contextmanager
    def _naming(self, part: str) -> Iterator[None]:
        """Name the part in what a tree of a wrong form raises."""
        try:
            yield
        except Exception as error:
            text = f"{part} in the manifest.json of {self._where}: {type(error).__name__}: {error}"
            raise CheckpointError(text) from error

    def _decoded(
        self,
        part: str,
        tree: Any,
        like: Callable[[str], torch.Tensor | None],
        of_others: frozenset[int] = frozenset(),
    ) -> Any:
        """Decode a tree. Its tensors are placed like what ``like`` returns, and filled later.

        ``of_others`` is where the memory begins that tensors of other parts are loaded into.
        """

        def make(name: str, local: torch.Tensor | None = None) -> torch.Tensor:
            present = made = like(name)
            if local is not None:
                return place_like(present, local) if isinstance(present, DTensor) else local
            if self._stored(name) is None:
                raise ValueError(self._lack_of(name))
            entry = self._manifest.tensors[self._manifest.ties.get(name, name)]
            # A present tensor is not filled in place if another part fills the same memory. For
            # example, an optimizer's average may begin as ``param.data``. Loaded in place, the
            # average and the parameter would overwrite each other. Tensors of one part may share
            # memory.
            if (
                made is None
                or isinstance(made, nn.Parameter)
                or not _fits(made, entry)
                or _begin_of(made) in of_others
            ):
                made = placed_like(present, entry.shape, dtype_of(entry.dtype))
            self._targets[name] = made
            self._filled.add(_begin_of(made))
            return made

        with self._naming(part):
            return decode(tree, make)

    # --- random states ---------------------------------------------------------------------

    def _read_random(self) -> Any:
        """Return the random state of this rank; None: there are more or fewer ranks now."""
        if not self._has_own or RANDOM not in self._manifest.rank_parts:
            return None
        with self._naming(RANDOM):
            return decode(self._reader.tree_of(own_part(self._ranks.rank, RANDOM)), lambda _: None)

    def _restore_random(self) -> None:
        if RANDOM not in self._manifest.rank_parts:
            self._how_random = "absent"
        elif self._random is None:
            files = sorted(self._manifest.files.items())
            saved = [part.crc32 for _, ranges in files for part in ranges]
            parts.derive_random_state(saved, self._ranks.rank)
            self._how_random = "derived"
        else:
            parts.restore_random_state(self._random)
            self._how_random = "restored"


def _fits(tensor: torch.Tensor, entry: TensorEntry) -> bool:
    return tensor.shape == entry.shape and tensor.dtype == dtype_of(entry.dtype)


def _begin_of(tensor: torch.Tensor) -> int:
    return plain_of(tensor).data_ptr()
