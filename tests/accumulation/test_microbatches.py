"""The ``microbatches`` loop, which needs nothing but batches."""

import pytest
from torch.utils.data import DataLoader, IterableDataset

import meshard
from tests.support.ones import make, values
from tests.support.threads import run_threads


class Stream(IterableDataset):
    """Has no length."""

    def __iter__(self):
        return iter([1.0, 2.0, 3.0])


def from_a_loader():
    model = make()
    model.set_is_last_backward(False)
    lifecycle = vars(model)["_meshard_unit"].lifecycle
    for batch in meshard.microbatches(model, DataLoader(Stream(), batch_size=None)):
        model(batch, None).backward()
    assert lifecycle.is_last_backward is False  # as it was before
    assert list(meshard.microbatches(model, [])) == []
    with pytest.raises(TypeError, match="until_last"):
        meshard.microbatches(model, [], until_last=True)
    lifecycle.is_last_backward = True
    return values(model)["a"]


def test_microbatches_need_no_length():
    assert run_threads(from_a_loader, 4) == [6.0] * 4
