"""Datasets in object storage: what comes out is what a directory gives, and no more is fetched than is needed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from models.disk import largest_file
from models.storage import s3_server, send
from torch.utils.data import DataLoader

from rollgen.errors import DatasetError, MissingFile, ResumeRefused, Unreadable, UsageError
from rollgen.format.commit import Holder
from rollgen.format.retries import RetryList
from rollgen.loader import Rollout, RolloutBatch, RolloutDataset, RolloutStream, collate
from rollgen.loader.index import open_index
from rollgen.loader.places import place_of
from rollgen.ops import Support
from rollgen.remote.lease import Lease, Watch, lock_name
from rollgen.remote.objects import ObjectStore
from rollgen.rollouts import Completion

KeysOf = Callable[[RolloutBatch], list[tuple[int, int, int]]]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The URL of a bucket in an S3 server."""
    with s3_server() as url:
        yield url


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of caches, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


@pytest.fixture
def dataset(
    write_shards: Callable[..., Path],
    make_completion: Callable[..., Completion],
    once: Callable[[str, Callable[[], Path]], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Three shards of three row groups of two samples: 1,000 tokens each, with 1 to 100 ids a token."""
    monkeypatch.setattr("rollgen.format.columns.ROW_GROUP_TOKENS", 2_000)
    rows = [[make_completion(p, k, tokens=1_000, largest=100) for p in range(6)] for k in range(3)]
    return once("remote", lambda: write_shards(rows))


class Traffic:
    """Bytes that are read of objects, by name and in all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[tuple[str, int]] = []
        read_range = ObjectStore.read_range

        def counted(store: ObjectStore, name: str, start: int, stop: int) -> bytes:
            self.requests.append((name, stop - start))
            return read_range(store, name, start, stop)

        monkeypatch.setattr(ObjectStore, "read_range", counted)

    def of_shards(self) -> int:
        """Bytes since this was asked before."""
        size = sum(size for name, size in self.requests if name.startswith("data/"))
        self.requests.clear()
        return size


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """What this process reads of objects from now on."""
    return Traffic(monkeypatch)


def stored_bytes(dataset: Path) -> int:
    return sum(path.stat().st_size for path in (dataset / "data").iterdir())


def assert_equal(one: Any, other: Any) -> None:
    """Every field of two rollouts or batches, bit for bit, but for where they are."""
    for field in fields(one):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, torch.Tensor):
            assert left.dtype == right.dtype, field.name
            assert torch.equal(left, right), field.name
        elif isinstance(left, Support):
            assert torch.equal(left.ids, right.ids)
            assert torch.equal(left.offsets, right.offsets)
        elif field.name != "dataset":
            assert left == right, field.name


def assert_same_batches(remote: list[RolloutBatch], local: list[RolloutBatch]) -> None:
    for one, other in zip(remote, local, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("options", [{}, {"group_by_prompt": True, "shuffle_window": 3_000}, {"shuffle": False}])
def test_a_stream(dataset: Path, options: dict[str, Any]) -> None:
    """All batches of two epochs; the states fit each other, too."""
    store = send(dataset, "memory://stream")
    local = RolloutStream(dataset, batch_tokens=2_500, **options)
    remote = RolloutStream(store.url, batch_tokens=2_500, **options)
    assert remote.state_dict() == local.state_dict()
    for _ in range(2):
        expected = list(local)
        assert_same_batches(list(remote), expected)
    remote.load_state_dict(local.state_dict(expected[2]))
    assert_same_batches(list(remote), expected[3:])


def test_a_dataset(dataset: Path) -> None:
    """Every row, forwards and in batches, after a pickle too; `collate` knows no difference."""
    remote = pickle.loads(pickle.dumps(RolloutDataset(send(dataset, "memory://dataset").url)))
    local = RolloutDataset(dataset)
    assert len(remote) == len(local) == 18
    rollouts: list[tuple[Rollout, Rollout]] = [(remote[index], local[index]) for index in range(18)]
    for one, other in rollouts:
        assert_equal(one, other)
    assert_equal(collate(remote.__getitems__([7, 3])), collate(local.__getitems__([7, 3])))


def test_directories_and_urls_together(tmp_path: Path, dataset: Path) -> None:
    """In one list, either first; and the same dataset under its URL twice is refused."""
    other = Path(shutil.copytree(dataset, tmp_path / "other"))
    url = send(dataset, "memory://mixed").url
    for paths, local in (([other, url], [other, dataset]), ([url, f"file://{other}"], [dataset, other])):
        assert_same_batches(list(RolloutStream(paths)), list(RolloutStream(local)))
    with pytest.raises(UsageError, match="given twice"):
        RolloutStream([url, f"{url}/"])


@pytest.mark.parametrize("context", [None, "fork", "spawn"])
def test_workers(bucket: str, dataset: Path, context: str | None) -> None:
    """Those of a DataLoader, forked after a read or spawned, and none, with S3."""
    store = send(dataset, bucket)
    count = 1 if context == "spawn" else 2  # each spends seconds on importing torch
    workers = {"num_workers": count, "multiprocessing_context": context} if context else {}
    stream = RolloutStream(store.url, batch_tokens=2_500)
    expected = list(RolloutStream(dataset, batch_tokens=2_500))
    assert_equal(next(iter(stream)), expected[0])
    stream.set_epoch(0)
    assert_same_batches(list(DataLoader(stream, batch_size=None, **workers)), expected)
    rollouts = RolloutDataset(store.url)
    assert rollouts[0].prompt_id == "p0"
    loader = DataLoader(rollouts, batch_size=5, collate_fn=collate, **workers)
    local = DataLoader(RolloutDataset(dataset), batch_size=5, collate_fn=collate)
    assert_same_batches(list(loader), list(local))


def test_ranks(dataset: Path, keys_of: KeysOf) -> None:
    """They take turns, as with a directory."""
    url = send(dataset, "memory://ranks").url
    expected = [keys_of(batch) for batch in RolloutStream(dataset, batch_tokens=2_500)]
    ranks = [list(RolloutStream(url, batch_tokens=2_500, rank=rank, world_size=2)) for rank in range(2)]
    seen = [keys_of(batch) for step in zip(*ranks, strict=True) for batch in step]
    assert [keys for keys in seen if keys] == expected


def test_ranks_and_a_writer(dataset: Path) -> None:
    """While one holds its lease, ranks could see different datasets; one rank sees what there is."""
    store = send(dataset, "memory://written")
    lease = Lease(store, lock_name("w1"), Holder(), Watch(store))
    lease.acquire(pytest.fail)
    with pytest.raises(UsageError, match=f"^{store.url}: writer 'w1' is adding to it"):
        RolloutStream(store.url, rank=0, world_size=2)
    assert RolloutStream(store.url).samples == 18
    lease.release()
    assert RolloutStream(store.url, rank=0, world_size=2).samples == 18


def test_the_index_is_a_small_part(
    write_shards: Callable[..., Path], make_completion: Callable[..., Completion], traffic: Traffic
) -> None:
    """Of two shards of 2 MB, mostly masks, it fetches the end, with the footer, and columns that lie in two places."""
    wide = {"tokens": 2_000, "vocab_size": 50_000, "largest": 200}
    dataset = write_shards([[make_completion(p, k, **wide) for p in range(8)] for k in range(2)])
    assert stored_bytes(dataset) > 4e6
    assert len(open_index([place_of(send(dataset, "memory://index").url)])) == 16
    assert len([name for name, _ in traffic.requests if name.startswith("data/")]) == 2 * 3
    assert traffic.of_shards() < 0.05 * stored_bytes(dataset)


def test_an_epoch_is_fetched_once(dataset: Path, traffic: Traffic) -> None:
    """With whatever cache, and with one that holds it, only once in all."""
    url = send(dataset, "memory://epoch").url
    stream = RolloutStream(url, batch_tokens=2_500)
    traffic.of_shards()
    assert len(list(stream)) > 5
    assert 0.8 * stored_bytes(dataset) < traffic.of_shards() <= stored_bytes(dataset)
    assert len(list(stream)) > 5
    assert traffic.of_shards() == 0


def test_a_cache_that_holds_next_to_nothing(dataset: Path, traffic: Traffic, home: Path) -> None:
    """The bound is kept, the batches are right, and an epoch still fetches a row group once, its footer with it."""
    url = send(dataset, "memory://small").url
    stream = RolloutStream(url, batch_tokens=2_500, disk_cache=home / "here", disk_cache_bytes=200_000)
    traffic.of_shards()
    assert_same_batches(list(stream), list(RolloutStream(dataset, batch_tokens=2_500)))
    footers = 9 * (32 << 10)
    assert traffic.of_shards() <= stored_bytes(dataset) + footers
    assert sum(path.stat().st_blocks * 512 for path in (home / "here").rglob("*") if path.is_file()) <= 200_000 + 4_096
    assert not (home / "rollgen").exists()


READER = """
import sys
from rollgen.loader import RolloutStream
from rollgen.remote.lease import Lease, Watch, lock_name
from rollgen.remote.objects import ObjectStore
read_range, sizes = ObjectStore.read_range, []
def counted(store, name, start, stop):
    sizes.append(stop - start if name.startswith("data/") else 0)
    return read_range(store, name, start, stop)
stream = RolloutStream(sys.argv[1], batch_tokens=2_500)
ObjectStore.read_range = counted
print(sum(map(len, stream)), sum(sizes))
"""


def test_processes_fetch_together(bucket: str, dataset: Path) -> None:
    """Each reads everything; what they fetch comes to the dataset once."""
    url = send(dataset, bucket).url
    command = [sys.executable, "-c", READER, url]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    seen = [tuple(map(int, process.communicate(timeout=180)[0].split())) for process in processes]
    assert [samples for samples, _ in seen] == [18] * 2
    assert sum(size for _, size in seen) <= stored_bytes(dataset)


def parts_of(home: Path) -> list[Path]:
    """The row groups in the cache: files as large as a shard."""
    return [path for path in home.rglob("*") if path.is_file() and path.stat().st_size > 50_000]


@pytest.mark.parametrize("kind", ["flipped", "truncated", "emptied"])
def test_a_damaged_copy_is_fetched_again(dataset: Path, home: Path, traffic: Traffic, kind: str) -> None:
    """Whatever happens to files in the cache, batches and rollouts are right."""
    url = send(dataset, "memory://copies").url
    stream, expected = RolloutStream(url, batch_tokens=2_500), list(RolloutStream(dataset, batch_tokens=2_500))
    assert_same_batches(list(stream), expected)
    rollouts = RolloutDataset(url)
    before = [rollouts[index].token_ids.tolist() for index in range(18)]
    for path in parts_of(home):
        size, content = path.stat().st_size, path.read_bytes()
        if kind == "flipped":  # one bit in each stretch that is there
            spoilt = bytearray(content)
            for at in range(0, size, 4_096):
                spoilt[at] ^= bool(spoilt[at])
            path.write_bytes(spoilt)
        else:
            os.truncate(path, size // 2 if kind == "truncated" else 0)
    traffic.of_shards()
    stream.set_epoch(0)
    assert_same_batches(list(stream), expected)
    assert [RolloutDataset(url)[index].token_ids.tolist() for index in (0, 17)] == [before[0], before[17]]
    assert traffic.of_shards() > 0.7 * stored_bytes(dataset)


def test_damage_in_the_storage(dataset: Path, damage: Callable[..., Path], home: Path) -> None:
    """An error that names the URL and the row group; or skipped, with the same losses as of a directory."""
    damage(dataset, 1, "sampling_mask", 2)
    url = send(dataset, "memory://damage").url
    with pytest.raises(DatasetError, match=rf"^{url}/data/part-w0-000001\.parquet: row group 2: damaged"):
        list(RolloutStream(url))
    with pytest.raises(DatasetError, match=rf"^{url}/data/part-w0-000001\.parquet: row group 2: damaged"):
        RolloutDataset(url)[11]
    skipping, local = RolloutStream(url, on_damage="skip"), RolloutStream(dataset, on_damage="skip")
    assert_same_batches(list(skipping), list(local))
    (loss,), (expected,) = skipping.losses, local.losses
    assert (loss.place, loss.samples) == (f"{url}/data/part-w0-000001.parquet: row group 2", expected.samples)
    assert str(dataset) not in loss.reason
    assert str(home) not in loss.reason


@pytest.mark.parametrize("column", ["sample_index", "footer"])
def test_damage_that_the_index_meets(dataset: Path, damage: Callable[..., Path], column: str) -> None:
    """A row group of narrow columns, or a whole shard: raised, or left out as of a directory."""
    if column == "footer":
        path = dataset / "data/part-w0-000001.parquet"
        content = bytearray(path.read_bytes())
        content[-60] ^= 1
        path.write_bytes(content)
    else:
        damage(dataset, 1, column, 1)
    url = send(dataset, "memory://index-damage").url
    with pytest.raises(DatasetError, match=rf"^{url}/data/part-w0-000001\.parquet: "):
        RolloutStream(url)
    skipping, local = RolloutStream(url, on_damage="skip"), RolloutStream(dataset, on_damage="skip")
    assert skipping.state_dict() == local.state_dict()
    assert [loss.reason for loss in skipping.losses] == [
        loss.reason.replace(str(dataset), url) for loss in local.losses
    ]


def test_objects_that_are_not_as_committed(dataset: Path) -> None:
    """Missing and cut ones, a missing journal, no dataset at all: the URL and the words of a directory."""
    store = send(dataset, "memory://objects")
    name = "data/part-w0-000002.parquet"
    content = store.read(name, 1 << 30)
    store.replace(name, content[:-100])
    with pytest.raises(DatasetError, match=rf"^{store.url}/{name}: \d+ bytes, the journal says {len(content)}: trunc"):
        RolloutStream(store.url)
    store.delete(name)
    with pytest.raises(MissingFile, match=rf"^{store.url}/{name}: missing, though committed"):
        RolloutStream(store.url)
    store.create("journal/replacement.json", b"{}")
    with pytest.raises(DatasetError, match=f"^{store.url}: is being compacted, or that was interrupted"):
        RolloutStream(store.url)
    store.delete("rollgen.json")
    store.delete("journal/replacement.json")
    with pytest.raises(DatasetError, match=rf"^{store.url}: holds shards but no rollgen\.json"):
        RolloutStream(store.url)
    with pytest.raises(DatasetError, match=r"^memory://nowhere/rollgen\.json: not found; memory://nowhere is not"):
        RolloutStream("memory://nowhere")


def test_a_shard_goes_away_while_it_is_read(dataset: Path) -> None:
    """No damage: it is not skipped."""
    store = send(dataset, "memory://away")
    stream = RolloutStream(store.url, on_damage="skip", prefetch=0)
    store.delete("data/part-w0-000001.parquet")
    with pytest.raises(MissingFile, match=rf"^{store.url}/data/part-w0-000001\.parquet: "):
        list(stream)


def test_a_live_dataset(dataset: Path) -> None:
    """A shard without its journal line counts; one committed later does not, and changes what a state is of."""
    journal = dataset / "journal/w0.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:2]) + lines[2][:30])
    store = send(dataset, "memory://live")
    remote, local = RolloutStream(store.url), RolloutStream(dataset)
    state = local.state_dict()
    assert remote.state_dict() == state
    assert_same_batches(list(remote), list(local))
    store.create("journal/w0-000002.jsonl", lines[2].encode())
    assert RolloutStream(store.url).state_dict() == state
    store.delete("journal/w0-000002.jsonl")
    store.delete("data/part-w0-000002.parquet")
    earlier = RolloutStream(store.url)
    assert earlier.samples == 12
    with pytest.raises(ResumeRefused, match="the dataset, or what the filter keeps of it, has changed"):
        earlier.load_state_dict(state)


def test_a_shard_that_is_retired_meanwhile(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between journal and listing its samples are made again in a new one: the journal is read once more."""
    store = send(dataset, "memory://retired")
    line = json.loads((dataset / "journal/w0.jsonl").read_text().splitlines()[2])
    content, listed = store.read("data/part-w0-000002.parquet", 1 << 30), ObjectStore.list
    store.delete("data/part-w0-000002.parquet")

    def list_and_retire(objects: ObjectStore, prefix: str = "") -> dict[str, int]:
        if prefix == "data" and not store.exists("journal/w1.jsonl"):
            store.create("data/part-w1-000000.parquet", content)
            lines = [line | {"retired": True}, line | {"file": "part-w1-000000.parquet"}]
            store.create("journal/w1.jsonl", b"".join(json.dumps(each).encode() + b"\n" for each in lines))
        return listed(objects, prefix)

    monkeypatch.setattr(ObjectStore, "list", list_and_retire)
    assert RolloutStream(store.url).samples == 18


def test_a_lost_generation(write_shards: Callable[..., Path], make_completion: Callable[..., Completion]) -> None:
    """Retry lists are read in the storage too: an earlier row is not taken for one that is lost."""
    first = [make_completion(0, k, finish_reason="length" if k == 1 else "stop") for k in range(3)]
    directory = write_shards([first, [make_completion(0, 1, tokens=20, generation=1)]], retries=1)
    RetryList(1, *(torch.tensor([value]).numpy() for value in (0, 1, 99))).write(directory / "retry-1.parquet")
    os.truncate(directory / "data/part-w0-000001.parquet", 300)
    stream = RolloutStream(send(directory, "memory://generations").url, on_damage="skip")
    assert sorted(int(k) for batch in stream for k in batch.sample_index) == [0, 2]


def test_names_that_lead_elsewhere(tmp_path: Path, dataset: Path) -> None:
    """An object may be called anything; none is written outside the copy."""
    import fsspec

    store = send(dataset, "memory://names")
    lure = "/names/" + store.url.rpartition("/")[2] + "/journal/../../../../../../.." + str(tmp_path / "lure.jsonl")
    fsspec.filesystem("memory").store[lure] = fsspec.filesystem("memory").store[
        "/names/" + store.url.rpartition("/")[2] + "/journal/w0.jsonl"
    ]
    assert RolloutStream(store.url).samples == 18
    assert not (tmp_path / "lure.jsonl").exists()


def test_a_cache_that_cannot_be(tmp_path: Path, dataset: Path) -> None:
    """Said before anything is fetched."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match=r"file/cache/rollgen/parts: cannot keep what is fetched there: .*disk_cache"):
        RolloutStream(send(dataset, "memory://no-cache").url, disk_cache=tmp_path / "file/cache")
    assert RolloutStream(dataset, disk_cache=tmp_path / "file/cache").samples == 18  # not needed


def test_a_cache_that_is_removed_in_an_epoch(dataset: Path, home: Path) -> None:
    """Training goes on."""
    stream = RolloutStream(send(dataset, "memory://removed").url, batch_tokens=2_500, prefetch=0)
    seen = []
    for batch in stream:
        seen.append(batch)
        shutil.rmtree(home, ignore_errors=True)
    assert_same_batches(seen, list(RolloutStream(dataset, batch_tokens=2_500)))


@pytest.mark.parametrize("on_damage", ["raise", "skip"])
def test_a_full_disk(
    tmp_path: Path, dataset: Path, home: Path, monkeypatch: pytest.MonkeyPatch, on_damage: Any
) -> None:
    """No damage to skip: the line names the directory, the reason and the fix; before the epoch, the temporary one."""
    url, reason = send(dataset, "memory://full").url, r"cannot keep what is fetched here: File too large; make room"
    stream = RolloutStream(url, prefetch=0, on_damage=on_damage)
    with largest_file(10_000), pytest.raises(Unreadable, match=rf"^{home}/rollgen/parts: {reason}.*disk_cache$"):
        list(stream)
    assert len(list(stream)) == 1
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with largest_file(100), pytest.raises(Unreadable, match=rf"^{tmp_path}: {reason} there, or set TMPDIR$"):
        RolloutStream(url, on_damage=on_damage)
