"""Scripts of clients in ``docs/how-to/``: the losses of torch's ``fully_shard``, bit for bit."""

import math

import pytest

from tests.clients.peers import CLIENTS
from tests.clients.scripts import Server

pytestmark = [pytest.mark.slow, pytest.mark.extras]


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.page)
def test_losses_are_those_of_torch(server, client):
    if client.missing:
        pytest.skip(f"needs {', '.join(client.missing)}")
    of_torch, ours = client.losses(server)
    assert any(of_torch) and len(ours) == client.num_ranks
    assert all(math.isfinite(loss) for losses in ours for loss in losses)
    assert ours == of_torch
