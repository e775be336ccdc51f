"""The same promises where nothing can be renamed and an object appears when it is closed."""

import contextlib
import importlib
import warnings

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from torch import nn

import meshard
from meshard.checkpoint import Checkpointer, CheckpointError
from meshard.checkpoint._protocol import storage
from tests.checkpoint.runs import assert_same_values, check_loads, net, train, trained, values_of
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.extras  # torch's checkpoints need NumPy


class LocalStore(LocalFileSystem):
    """A folder as an object store: no renames, and requests that fail when they are told to."""

    protocol = "localstore"
    cachable = False
    fails_at = None  # the number of requests that succeed
    requests = 0
    reads = ()

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("localstore://"))

    @classmethod
    def request(cls):
        if cls.fails_at is not None and cls.requests >= cls.fails_at:
            raise OSError("503 Slow Down")
        cls.requests += 1

    def cat_file(self, path, start=None, end=None, **kwargs):
        type(self).reads += (path,)
        return super().cat_file(path, start, end, **kwargs)

    def mv(self, *args, **kwargs):
        raise NotImplementedError("an object store does not rename")

    mv_file = rename = move = mv

    def _open(self, path, mode="rb", **kwargs):
        self.request()
        return super()._open(path, mode, **kwargs)

    def rm(self, *args, **kwargs):
        self.request()
        return super().rm(*args, **kwargs)

    def rm_file(self, *args, **kwargs):
        self.request()
        return super().rm_file(*args, **kwargs)


def store_at(folder):
    fsspec.register_implementation("localstore", LocalStore, clobber=True)
    LocalStore.fails_at = None
    return f"localstore://{folder}/bucket/run"


def check_a_run(url, layout):
    model, optimizer = trained(layout)
    checkpointer = Checkpointer(url, keep=2)
    for step in range(3):
        train(model, optimizer, 1)
        checkpointer.save(step, model, optimizer, note=step)
    checkpointer.wait()
    assert checkpointer.steps() == [1, 2]
    assert checkpointer.verify() == []
    loaded = check_loads(checkpointer, layout, values_of(model, optimizer))
    assert (loaded.step, loaded.extra) == (2, {"note": 2})
    checkpointer.save(2, model, optimizer)
    assert checkpointer.steps() == [1, 2]
    assert checkpointer.verify() == []


@on_ranks(2)
def test_a_run_is_saved_resumed_and_pruned(tmp_path):
    check_a_run(store_at(tmp_path), "fully_shard")


@pytest.mark.slow
def test_it_is_so_in_s3(monkeypatch):
    server = importlib.import_module("moto.server").ThreadedMotoServer(
        ip_address="127.0.0.1", port=0, verbose=False
    )
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "anyone",
        "AWS_SECRET_ACCESS_KEY": "anything",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    boto3 = importlib.import_module("boto3")
    boto3.client("s3", endpoint_url=f"http://{host}:{port}").create_bucket(Bucket="bucket")
    try:
        check_a_run("s3://bucket/run", "plain")
    finally:
        server.stop()


@pytest.mark.parametrize("verify", [True, False])
@on_ranks(2)
def test_many_small_tensors_are_read_by_few_requests(tmp_path, verify):
    model = meshard.fully_shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(40))))
    checkpointer = Checkpointer(store_at(tmp_path))
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    checkpointer.save(1, model, optimizer)
    expected = values_of(model, optimizer)
    step()
    LocalStore.reads = ()
    checkpointer.load(model, optimizer, verify=verify)
    assert_same_values(values_of(model, optimizer), expected)
    # For 320 tensors: one request for each file, after what says where they are.
    assert sum(path.endswith(".safetensors") for path in LocalStore.reads) <= 4, LocalStore.reads


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: data.replace(b"F32", b"F16"), "is not as it was written"),
        (lambda data: data[:1000], r"rank-00000\.safetensors ends before byte"),
    ],
)
def test_an_object_that_was_changed_or_cut_off_is_noticed(tmp_path, damage, text):
    checkpointer, model = Checkpointer(store_at(tmp_path)), nn.Linear(2, 2)
    checkpointer.save(1, model)
    path = tmp_path / "bucket/run/step-1/rank-00000.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    before = values_of(model)
    with pytest.raises(CheckpointError, match=text):
        checkpointer.load(model)
    assert_same_values(values_of(model), before)


def test_without_fsspec_the_install_command_is_named(monkeypatch):
    monkeypatch.setattr(storage, "url_to_fs", None)
    with pytest.raises(ImportError, match="pip install fsspec s3fs"):
        Checkpointer("s3://bucket/run")


@on_ranks(2)
def test_a_request_that_fails_at_any_moment_leaves_the_checkpoint_before(tmp_path):
    model = net("fully_shard")
    checkpointer = Checkpointer(store_at(tmp_path), keep=1)
    checkpointer.save(0, model)
    LocalStore.requests = 0
    checkpointer.save(1, model)
    checkpointer.wait()
    counts = [None, None]
    dist.all_gather_object(counts, LocalStore.requests)
    step = 1
    for rank, count in enumerate(counts):
        for number in range(count):
            LocalStore.requests = 0
            LocalStore.fails_at = number if dist.get_rank() == rank else None
            with contextlib.suppress(CheckpointError), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "old checkpoints in .* could not be removed")
                checkpointer.save(step + 1, model)
                checkpointer.wait()
            LocalStore.fails_at = None
            dist.barrier()
            latest = checkpointer.latest_step()
            assert latest in (step, step + 1)
            assert checkpointer.verify(latest) == []
            step = latest
            dist.barrier()
    checkpointer.save(step + 1, model)
    assert checkpointer.steps() == [step + 1]
    # Marker, own file, manifest, the old step's manifest, files and marker, reads of three markers;
    # rank 1: its file.
    assert counts == [9, 1]
