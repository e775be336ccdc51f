"""Checkpoints in S3, of a server on this machine."""

import importlib
import os

import pytest
import torch

from meshard.checkpoint import Checkpointer
from tests.checkpoint.runs import assert_same_values, net, train, values_of

pytestmark = [pytest.mark.extras, pytest.mark.slow]


@pytest.fixture
def bucket(monkeypatch):
    """The URL of a bucket; the server forgets it afterwards."""
    server = importlib.import_module("moto.server").ThreadedMotoServer(
        ip_address="127.0.0.1", port=0, verbose=False
    )
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    for name, value in {
        "AWS_ACCESS_KEY_ID": "anyone",
        "AWS_SECRET_ACCESS_KEY": "anything",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
    }.items():
        monkeypatch.setenv(name, value)
    boto3 = importlib.import_module("boto3")
    boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"]).create_bucket(Bucket="bucket")
    yield "s3://bucket/run"
    server.stop()


def test_a_run_is_saved_resumed_pruned_and_verified(bucket):
    model = net("plain")
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = Checkpointer(bucket, keep=2)
    for step in range(3):
        train(model, optimizer, 1)
        checkpointer.save(step, model, optimizer, note=step)
    checkpointer.wait()
    assert checkpointer.steps() == [1, 2]
    assert checkpointer.verify() == []
    expected = values_of(model, optimizer)
    other = net("plain", seed=3)
    optimizer = torch.optim.AdamW(other.parameters())
    assert checkpointer.load(other, optimizer).extra == {"note": 2}
    assert_same_values(values_of(other, optimizer), expected)
    checkpointer.save(2, other, optimizer)
    assert checkpointer.steps() == [1, 2]
    assert checkpointer.verify() == []
