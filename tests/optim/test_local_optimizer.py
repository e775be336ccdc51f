"""Local optimizers: which steps they take, what users edit between two, and what they keep."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import meshard
from meshard import local_optimizer
from tests.optim.optimizers import (
    assert_same_state,
    make,
    plain_state,
    train,
    trainable,
    uneven,
    window,
)
from tests.support.models import Made, seeded
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_ranks, on_threads
from tests.support.spread import mostly_slow

ADAM, ADAMW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD


def make_loose(foreach=None):
    """Return square weights, an uneven one, one smaller than the number of ranks, one in no unit.

    Foreach kernels of the ordinary optimizer take no loose parameters.
    """

    def forward(model, x):
        for layer in model.layers:
            x = torch.tanh(layer(x)) * model.loose
        return model.head(x)

    layers, head = [nn.Linear(6, 6) for _ in range(2)], nn.Linear(6, 1)
    model = seeded(Made(forward, layers=layers, head=head, loose=nn.Parameter(torch.empty(6))))
    meshard.fully_shard(layers[0])
    return meshard.fully_shard(model, ignored_params=set() if foreach else {model.loose})


def backward(model, step):
    model(torch.full((2, 6), 0.1 * step + 0.1)).square().sum().backward()


def play(story, make_model, cls, *, is_local, **options):
    """Return the model after ``story``, and the state; the user's own entries are left out."""
    model = make_model()
    optimizer = (local_optimizer if is_local else lambda _, *args, **kw: cls(*args[1:], **kw))(
        model, cls, trainable(model), **options
    )
    story(model, optimizer)
    states = plain_state(optimizer)
    for state in states.values():
        state.pop("note", None)
    return full_state(model), states


def both(story, make_model, cls=ADAMW, **options):
    """Play ``story`` with a local optimizer and with the ordinary one, and compare."""
    ours, theirs = (
        play(story, make_model, cls, is_local=each, **options) for each in (True, False)
    )
    assert_same(ours[0], theirs[0], bitwise=True)
    assert_same_state(ours[1], theirs[1])
    return ours


@on_threads(2)
def test_fused_kernels():
    both(lambda *args: train(*args, range(5)), make, lr=0.01, fused=True)


@on_ranks(2)
@pytest.mark.parametrize(("dtype", "cls"), [(torch.bfloat16, ADAMW), (torch.float64, SGD)])
def test_a_model_that_is_converted_between_steps(dtype, cls):
    """Storage that is replaced is stepped where it is now; of bfloat16, gradients lie apart."""

    def story(model, optimizer):
        for step in range(0 if dtype is torch.float64 else 2, 7):
            if step == 2:
                model.to(dtype)
            dtype_now = next(model.parameters()).dtype
            model(torch.full((2, 7), 0.1 * step, dtype=dtype_now)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    both(story, uneven, cls, lr=0.01)


@on_threads(2)
def test_guards_hold_and_no_gradient_is_kept():
    model = make()
    optimizer = local_optimizer(model, ADAMW)
    window(model, 0, "N")
    before = full_state(model)
    with pytest.raises(RuntimeError, match="not reduced yet"):
        optimizer.step()
    assert_same(full_state(model), before, bitwise=True)
    optimizer.zero_grad()
    assert not meshard.pending_gradients(model)
    train(model, optimizer, range(1))
    placeholders = optimizer._step._placeholders
    assert [each.grad for each in placeholders] == [None] * len(placeholders)
    assert sum(each.numel() for each in placeholders) == 0


@on_ranks(2)
def test_groups_that_are_added_later():
    model = make()
    optimizer = local_optimizer(model, ADAMW, lr=0.01)
    train(model, optimizer, range(2))
    late = nn.Linear(2, 2)
    optimizer.add_param_group({"params": late.parameters(), "lr": 1.0})
    before = late.weight.detach().clone()
    window(model, 0)
    late(torch.ones(1, 2)).sum().backward()
    with pytest.warns(UserWarning, match=r"are in no unit \(2 in all"):
        optimizer.step()
    assert not torch.equal(late.weight, before)


@on_threads(2)
def test_a_parameter_that_is_put_into_a_group_is_stepped():
    model, other = make(), make()
    optimizer = local_optimizer(model, SGD, lr=0.1)
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["params"][0] = next(other.parameters())
    name = next(iter(dict(model.named_parameters())))
    before = full_state(model)[name], full_state(other)[name]
    for each in (model, other):
        window(each, 1)
    optimizer.step()
    assert torch.equal(full_state(model)[name], before[0])
    assert not torch.equal(full_state(other)[name], before[1])


@on_threads(3)
def test_edits_of_the_state_where_a_rank_owns_nothing():

    def story(model, optimizer):
        param = optimizer.param_groups[0]["params"][1]
        state = lambda: optimizer.state[param]  # noqa: E731
        edits = [
            lambda: None,
            lambda: optimizer.state.pop(param),
            lambda: state()["step"].zero_(),
            lambda: state().update(exp_avg=state()["exp_avg"] * 0.5),
            lambda: optimizer.state.update({param: {}}),
            lambda: optimizer.state.clear(),
            lambda: [s["step"].add_(1) for s in optimizer.state_dict()["state"].values()],
            lambda: None,
        ]
        for step, edit in enumerate(edits):
            edit()
            model(torch.full((2, 7), 0.1 * step + 0.1)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    both(story, uneven, lr=0.01)


# --- what works as with the ordinary one ---------------------------------------------------


def scaled(model, optimizer):
    scaler = meshard.ShardedGradScaler("cpu", init_scale=8.0)
    for factor in (1.0, float("inf"), 1.0, 1.0):
        scaler.scale(model(torch.full((2, 7), 0.3)).square().sum() * factor).backward()
        scaler.unscale_(optimizer)
        meshard.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 4.0


def step_with(model, optimizer, value):
    model(torch.full((2, 7), value)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def hooked(model, optimizer):
    """What hooks of ``step`` change counts, before and after it."""

    def before(own, args, kwargs):
        own.param_groups[0]["lr"] *= 0.5
        for param in model.parameters():
            param.grad.mul_(2.0)

    def after(own, args, kwargs):
        own.state[model.layers[0].weight]["exp_avg"].mul_(0.5)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    for step in range(3):
        step_with(model, optimizer, 0.1 * step + 0.1)


def thawed(model, optimizer):
    for step in range(6):
        model.layers[0].requires_grad_(step not in (0, 1, 4))
        step_with(model, optimizer, 0.1 * step + 0.1)


def emptied_and_loaded(model, optimizer):
    for step in range(4):
        if step == 2:
            saved = {name: value.clone() for name, value in model.state_dict().items()}
            model.to_empty(device="cpu")
            model.load_state_dict(saved)
        step_with(model, optimizer, 0.1 * step + 0.1)


def replaced(model, optimizer):
    """Parameters that a load has replaced are not those of the optimizer, which says so."""
    step_with(model, optimizer, 0.1)
    model.load_state_dict(model.state_dict(), assign=True)
    model(torch.full((2, 7), 0.2)).sum().backward()
    with pytest.raises(RuntimeError, match="as it was before it was replaced"):
        optimizer.step()


def state_in_another_dtype(model, optimizer):
    for step in range(4):
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].double().float()
        step_with(model, optimizer, 0.1 * step + 0.1)


STORIES = [scaled, hooked, thawed, emptied_and_loaded, replaced, state_in_another_dtype]


@on_ranks(3)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_what_works_as_with_the_ordinary_one(story):
    both(story, uneven, lr=0.01)


@on_ranks(2)
def test_a_copy_with_its_model_goes_on_alike():
    model = uneven()
    optimizer = local_optimizer(model, ADAMW, lr=0.01)
    step_with(model, optimizer, 0.1)
    copied, own = copy.deepcopy((model, optimizer))
    for each in ((model, optimizer), (copied, own)):
        step_with(*each, 0.2)
    assert_same(full_state(copied), full_state(model), bitwise=True)
    assert_same_state(plain_state(own), plain_state(optimizer))
    assert own.state.keys() == set(copied.parameters())


# --- edits between backward and step -------------------------------------------------------


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def second(model, optimizer):
    """Return the state of a parameter in the middle of a param group."""
    return optimizer.state[model.layers[1].bias]


def editing(edit, at=(1, 3)):
    """Return a story with an edit between backward and step, at some of five steps."""

    def story(model, optimizer):
        for step in range(5):
            backward(model, step)
            if step in at:
                edit(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()

    return story


def halved(model, optimizer):
    return second(model, optimizer)["exp_avg"] * 0.5


def put_into_another(model, optimizer):
    state = second(model, optimizer)
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"].sqrt(), state["exp_avg"].square()


def exchange(model, optimizer):
    """Only the order tells: the objects are the same."""
    state = second(model, optimizer)
    state["exp_avg"].mul_(0.5)
    state["exp_avg_sq"].copy_(state["exp_avg"].square())
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].square()


def swap_parameter(model, optimizer):
    param = model.layers[1].weight
    new = nn.Parameter((param * 0.5).detach())
    new.grad = param.grad
    torch.utils.swap_tensors(param, new)


def replace_all(model, optimizer):
    halved = {
        param: {**state, "exp_avg": state["exp_avg"] * 0.5}
        for param, state in optimizer.state.items()
    }
    optimizer.state = type(optimizer.state)(dict, halved)


def another_group(model, optimizer):
    """Move a parameter from the middle of a param group into a group of its own, and back."""
    first = optimizer.param_groups[0]
    param = model.layers[1].bias
    if len(optimizer.param_groups) == 2:
        first["params"].append(param)
        optimizer.param_groups[1]["params"].clear()
        return
    first["params"] = [each for each in first["params"] if each is not param]
    optimizer.param_groups.append({**first, "params": [param], "lr": 0.2})


def one_less(model, optimizer):
    params = optimizer.param_groups[0]["params"]
    params[:] = [param for param in params if param is not model.layers[1].bias]
    optimizer.state.pop(model.layers[1].bias, None)


def transposed_gradients(model, optimizer):
    """The same memory, in another order."""
    for layer in model.layers:
        param = layer.weight
        part = local(param.grad)
        turned = part.as_strided(part.shape, (1, part.shape[0]))
        param.grad = DTensor.from_local(turned, param.device_mesh, param.placements)


EDITS = {
    "halve in place": lambda m, o: second(m, o)["exp_avg"].mul_(0.5),
    "halve locally": lambda m, o: local(second(m, o)["exp_avg_sq"]).mul_(0.5),
    "replace": lambda m, o: second(m, o).update(exp_avg=halved(m, o)),
    "put into another": put_into_another,
    "exchange": exchange,
    "swap": lambda m, o: torch.utils.swap_tensors(second(m, o)["exp_avg"], halved(m, o)),
    "swap the parameter": swap_parameter,
    "count on": lambda m, o: second(m, o)["step"].add_(7),
    "count on behind the version": lambda m, o: second(m, o)["step"].data.add_(7),
    "replace the count": lambda m, o: second(m, o).update(step=torch.tensor(9.0)),
    "forget one": lambda m, o: o.state.pop(m.layers[1].bias),
    "empty one": lambda m, o: o.state.update({m.layers[1].bias: {}}),
    "replace a dict": lambda m, o: o.state.update(
        {m.layers[1].bias: {**second(m, o), "exp_avg": halved(m, o)}}
    ),
    "replace all": replace_all,
    "edit a loose one": lambda m, o: o.state[m.loose].update(
        exp_avg=o.state[m.loose]["exp_avg"] * 0.5
    ),
    "empty a loose one": lambda m, o: o.state.update({m.loose: {}}),
    "other hyperparameters": lambda m, o: o.param_groups[0].update(
        lr=0.03, betas=(0.5, 0.6), weight_decay=0.3, maximize=True
    ),
    "another group": another_group,
    "another place in the group": lambda m, o: o.param_groups[0]["params"].reverse(),
    "one less": one_less,
    "no gradient": lambda m, o: setattr(m.layers[1].bias, "grad", None),
    "own gradient": lambda m, o: setattr(m.layers[1].bias, "grad", m.layers[1].bias.grad * 3),
    "gradient in place": lambda m, o: local(m.layers[1].bias.grad).mul_(3),
    "transposed gradients": transposed_gradients,
    "note": lambda m, o: second(m, o).update(note="mine"),  # of the user's own
}
WITH_FOREACH = ["replace", "replace the count", "empty one", "no gradient", "transposed gradients"]
EACH_EDIT = [(name, None) for name in EDITS] + [(name, True) for name in WITH_FOREACH]
FAST = [(name, None) for name in ("replace", "empty one", "another group", "no gradient")]
FAST += [(name, True) for name in ("replace the count", "transposed gradients")]


@pytest.mark.filterwarnings("ignore:no optimizer has stepped")  # some edits leave one out
@on_threads(2)
@pytest.mark.parametrize(("name", "foreach"), mostly_slow(EACH_EDIT, *FAST))
def test_edits_between_backward_and_step(name, foreach):
    """Train with a local optimizer and the ordinary one; the edit must change what comes out."""

    def make_model():
        return make_loose(foreach)

    options = {"lr": 0.01, "foreach": foreach}
    edited, _ = both(editing(EDITS[name]), make_model, **options)
    if name not in ("note", "another place in the group"):
        story = editing(lambda *_: None)
        untouched, _ = play(story, make_model, ADAMW, is_local=True, **options)
        assert any(not torch.equal(edited[each], value) for each, value in untouched.items())


# --- steps that raise, and what is kept between steps ---------------------------------------


def raise_for_the_rate(optimizer):
    group = optimizer.param_groups[0]
    lr, group["lr"] = group["lr"], "fast"
    with pytest.raises(TypeError):
        optimizer.step()
    group["lr"] = lr


@on_threads(2)
def test_a_step_that_raised_can_be_mended():
    def raise_and_begin_anew(model, optimizer):
        raise_for_the_rate(optimizer)
        # The ordinary one was through with the momentum of one parameter, the other with that of a
        # run.
        optimizer.state.clear()

    both(editing(raise_and_begin_anew), make_loose, SGD, lr=0.01, momentum=0.9)


def raise_twice(model, optimizer):
    """Have a step raise for its hyperparameters, and one for a state that is missing."""
    raise_for_the_rate(optimizer)
    gone = second(model, optimizer).pop("exp_avg")
    with pytest.raises(KeyError, match="exp_avg"):
        optimizer.step()
    second(model, optimizer)["exp_avg"] = gone


@on_threads(2)
def test_a_step_that_raised_counts_as_far_as_the_ordinary_one_had_come():
    both(editing(raise_twice), lambda: make_loose(foreach=True), lr=0.01, foreach=True)


@on_threads(2)
def test_state_that_comes_later():
    def begin(model, optimizer):
        assert not plain_state(optimizer)
        optimizer.param_groups[0]["momentum"] = 0.9

    _, state = both(editing(begin, at=[2]), make_loose, SGD, lr=0.1)
    assert state


@on_threads(2)
def test_parameters_whose_counts_become_equal_are_not_skipped():
    ones = {name: nn.Parameter(torch.ones(4)) for name in "abcd"}
    made = Made(lambda model, names: sum(getattr(model, name).sum() for name in names), **ones)
    model = meshard.fully_shard(made)
    first, ends = full_state(model), []
    for make_one in (ADAM, lambda params, **kw: local_optimizer(model, ADAM, **kw)):
        model.load_state_dict({name: value.clone() for name, value in first.items()})
        state = None
        for windows in (["abcd", "bcd"], ["a", "bd"]):  # with a checkpoint in between
            optimizer = make_one(model.parameters(), lr=0.1)
            if state is not None:
                optimizer.load_state_dict(state)
            for names in windows:
                optimizer.zero_grad()
                model(names).backward()
                optimizer.step()
            state = copy.deepcopy(optimizer.state_dict())
        ends.append(full_state(model))
    assert_same(*ends, bitwise=True)


@on_threads(2)
def test_the_private_optimizer_and_the_memory_of_its_state_are_kept_from_step_to_step():
    model = make_loose()
    optimizer = local_optimizer(model, ADAMW, lr=0.01)
    found = []
    for step in range(8):
        backward(model, step)
        optimizer.step()
        if step >= 4:
            second(model, optimizer)["exp_avg"].mul_(0.5)
            second(model, optimizer)["note"] = "mine"
            backward(model, step)
            optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.zero_grad()
        private = optimizer._step._optimizer
        states = [value for state in private.state.values() for value in state.values()]
        places = [each.data_ptr() for each in states if isinstance(each, torch.Tensor)]
        found.append([id(private), *sorted(places)])
    assert all(each == found[0] for each in found)


@on_threads(2)
def test_state_tensors_that_were_read_before_are_those_of_later_steps():
    model = make_loose()
    optimizer = local_optimizer(model, ADAMW, lr=0.01)
    backward(model, 0)
    optimizer.step()
    before = second(model, optimizer)["exp_avg"]
    values = before.to_local().clone()
    backward(model, 1)
    optimizer.step()
    assert second(model, optimizer)["exp_avg"] is before
    assert not values.numel() or not torch.equal(before.to_local(), values)


@on_ranks(2)
def test_hooks_of_all_optimizers_hear_of_a_step_once():
    model = make_loose()
    optimizer = local_optimizer(model, ADAMW, lr=0.01)
    calls = []
    handles = [
        register_optimizer_step_pre_hook(lambda own, args, kwargs: calls.append(own)),
        register_optimizer_step_post_hook(lambda own, args, kwargs: calls.append(own)),
    ]
    for step in range(2):
        backward(model, step)
        optimizer.step()
    for handle in handles:
        handle.remove()
    assert calls == [optimizer] * 4


@on_threads(2)
def test_counters_have_memory_of_their_own():
    """A counter is saved with its own four bytes, not with those of the whole model."""
    model = make_loose()
    optimizer = local_optimizer(model, ADAMW, lr=0.01)
    for step in range(3):
        backward(model, step)
        optimizer.step()
    counters = [state["step"] for state in optimizer.state.values()]
    assert {int(each) for each in counters} == {3}
    assert {each.untyped_storage().nbytes() for each in counters} == {4}
    assert len({each.data_ptr() for each in counters}) == len(counters)


@on_threads(2)
def test_a_gradient_with_other_placements_is_refused():
    """Its shard has as many elements as that of the parameter, which hides the mistake."""
    model = meshard.fully_shard(seeded(nn.Linear(4, 4, bias=False)))
    optimizer = local_optimizer(model, SGD, lr=1.0)
    model(torch.ones(1, 4)).sum().backward()
    gradient = model.weight.grad
    for other in (gradient.redistribute(placements=[Shard(1)]), gradient.full_tensor()):
        model.weight.grad = other
        with pytest.raises(RuntimeError, match=r"shape \(4, 4\) is .*, and the parameter is a DT"):
            optimizer.step()
    model.weight.grad = gradient
    optimizer.step()


@on_threads(1)
def test_a_copy_has_the_defaults_of_the_optimizer():
    model = meshard.fully_shard(nn.Linear(2, 2))
    optimizer = meshard.local_optimizer(model, ADAMW, [model.weight], lr=0.5)
    copied, own = copy.deepcopy((model, optimizer))
    own.add_param_group({"params": [copied.bias]})
    assert [group["lr"] for group in own.param_groups] == [0.5, 0.5]


@on_threads(1)
def test_the_state_of_an_overlapped_optimizer_outlives_the_model():
    model = meshard.fully_shard(nn.Linear(2, 2))
    optimizer = meshard.overlap_optimizer(model, ADAMW, lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    del model
    assert len(optimizer.state_dict()["state"]) == 2


@pytest.mark.parametrize("make", [meshard.local_optimizer, meshard.overlap_optimizer])
@on_threads(1)
def test_a_state_that_is_made_later_begins_as_the_user_has_set_it(make):
    model = meshard.fully_shard(nn.Linear(2, 2))
    optimizer = make(model, torch.optim.Adagrad, [model.weight], initial_accumulator_value=0.5)
    optimizer.add_param_group({"params": [model.bias]})
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert optimizer.state[model.bias]["sum"].full_tensor().tolist() == [1.5, 1.5]
