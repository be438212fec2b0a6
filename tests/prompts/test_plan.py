"""`plan.parquet`: written, read, damaged, grown."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollgen.errors import DatasetError, ResumeRefused
from rollgen.format.schema import PLAN_SCHEMA
from rollgen.prompts.plan import Plan, PlanWriter, check_growth
from rollgen.rollouts import Prompt, Sampling


def prompt(index, **changes):
    fields = {
        "prompt_id": f"p{index}",
        "prompt_index": index,
        "token_ids": np.arange(index, dtype=np.int32),
        "sampling": Sampling(temperature=0.7, top_p=0.9, top_k=20, stop=("a", "\x00"), stop_token_ids=(3,)),
        "n": index % 3 + 1,
        "seed": 2**63 - 1,
        "prompt": None if index % 2 else "text 😀",
        "metadata": '{"a": 1}',
        "error": None,
    }
    return Prompt(**{**fields, **changes})


def write(path, prompts, group=3):
    with PlanWriter(path) as writer:
        for start in range(0, len(prompts), group):
            writer.write(prompts[start : start + group])
    return Plan(path)


def as_dict(item):
    return {name: getattr(item, name) for name in Prompt.__dataclass_fields__} | {"token_ids": item.token_ids.tolist()}


def test_rows_come_back_as_they_were(tmp_path):
    """Over several row groups, from any start."""
    prompts = [prompt(index) for index in range(8)]
    plan = write(tmp_path / "plan.parquet", prompts)
    for start in range(9):
        assert [as_dict(item) for item in plan.rows(start)] == [as_dict(item) for item in prompts[start:]]
    assert next(iter(plan)).token_ids.dtype == np.int32


@pytest.mark.parametrize("indices", [[], [7], [0, 1, 2], [6, 0, 6, 3, 3, 7, 0]], ids=str)
def test_ids_of_some_prompts(tmp_path, indices):
    """In the order asked for, and as often; of any length, so with offsets of 64 bits."""
    ids = write(tmp_path / "plan.parquet", [prompt(index) for index in range(8)]).prompt_ids(np.array(indices, int))
    assert ids.type == pa.large_string()
    assert ids.to_pylist() == [f"p{index}" for index in indices]


def test_counts(tmp_path):
    """n is 1, 2, 3, 1: sample 0 of prompt 3 is number 6 of 7; a tombstone keeps its samples."""
    plan = write(
        tmp_path / "p", [prompt(0), prompt(1, error="bad", token_ids=np.empty(0, np.int32)), prompt(2), prompt(3)]
    )
    assert (plan.prompts, plan.samples) == (4, 7)
    assert plan.n.tolist() == [1, 2, 3, 1]
    assert plan.offsets.tolist() == [0, 1, 3, 6, 7]
    assert plan.tombstone.tolist() == [False, True, False, False]
    assert (plan.n.dtype, plan.offsets.dtype, plan.tombstone.dtype) == (np.int32, np.int64, np.bool_)


def test_pages_are_checksummed(tmp_path):
    """A flipped bit in the data is found, and the row group named."""
    path = tmp_path / "plan.parquet"
    plan = write(path, [prompt(index, prompt="x" * 100) for index in range(6)])
    column = pq.ParquetFile(path).metadata.row_group(1).column(PLAN_SCHEMA.names.index("prompt"))
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=r"plan\.parquet: row group 1: damaged: .*--resume"):
        list(plan)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "missing"), (b"", "not readable as Parquet"), (b"PAR1 and then nothing", "not readable as Parquet")],
    ids=["missing", "empty", "garbage"],
)
def test_unreadable_files_are_dataset_errors(tmp_path, content, message):
    """With the file's name and what to do."""
    path = tmp_path / "plan.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DatasetError, match=rf"plan\.parquet: {message}.*; --resume with the very"):
        Plan(path)


def test_a_truncated_file_is_a_dataset_error(tmp_path):
    """A plan is never believed by its name."""
    path = tmp_path / "plan.parquet"
    write(path, [prompt(0)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DatasetError, match="not readable as Parquet"):
        Plan(path)


def test_another_schema_is_a_dataset_error(tmp_path):
    """Any other Parquet file."""
    path = tmp_path / "plan.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(DatasetError, match="its columns are not those of format 1"):
        Plan(path)


def test_columns_of_a_later_minor_are_left_alone(tmp_path):
    """Whatever they are called and hold; the planned rows are the same."""
    path = tmp_path / "plan.parquet"
    before = list(write(path, [prompt(0), prompt(1)]))
    table = pq.read_table(path).append_column("difficulty", pa.array([{"a": [0.5]}, None]))
    pq.write_table(table, path, write_page_checksum=True)
    assert [row.prompt_id for row in Plan(path)] == [row.prompt_id for row in before]
    assert next(Plan(path).batches()).schema.equals(PLAN_SCHEMA)


def test_pages_without_checksums_are_refused(tmp_path):
    """Damage would go unseen."""
    path = tmp_path / "plan.parquet"
    write(path, [prompt(0)])
    pq.write_table(pq.read_table(path), path)
    with pytest.raises(DatasetError, match=r"row group 0: damaged: .* carries no checksum"):
        Plan(path)


def test_an_inconsistent_plan_is_a_dataset_error(tmp_path):
    """prompt_index is the row number, n at least 1, and there is at least one row."""
    path = tmp_path / "plan.parquet"
    for prompts in ([prompt(0), prompt(2)], [prompt(0, n=0)], []):
        with pytest.raises(DatasetError, match="not a valid plan"):
            write(path, prompts)


@pytest.mark.parametrize("group", [1, 2, 5, 100])
def test_growth_is_more_rows_and_larger_n(tmp_path, group):
    """However the row groups are cut."""
    stored = write(tmp_path / "stored", [prompt(index) for index in range(5)])
    same = write(tmp_path / "same", [prompt(index) for index in range(5)], group)
    grown = write(tmp_path / "grown", [prompt(index, n=5) for index in range(9)], group)
    check_growth(stored, same)
    check_growth(stored, grown)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"prompt_id": "other"}, r"prompts: row 4 .*\(id 'p4'\) has another prompt_id", id="id"),
        pytest.param({"token_ids": np.array([9], np.int32)}, "another prompt_token_ids", id="token ids"),
        pytest.param({"seed": 1}, "another seed", id="seed"),
        pytest.param({"sampling": Sampling()}, "another temperature", id="sampling"),
        pytest.param({"prompt": "other"}, "another prompt", id="text"),
        pytest.param({"metadata": None}, "another metadata", id="metadata"),
        pytest.param({"error": "bad"}, "another error", id="error"),
        pytest.param({"n": 1}, r"n: prompt 'p4' \(row 4 of the plan\) was planned with 2 samples, now with 1", id="n"),
    ],
)
def test_changed_rows_are_refused(tmp_path, changes, message):
    """Naming the key, the row and what changed."""
    stored = write(tmp_path / "stored", [prompt(index) for index in range(6)])
    rows = [prompt(index) for index in range(6)]
    rows[4] = prompt(4, **changes)
    with pytest.raises(ResumeRefused, match=message):
        check_growth(stored, write(tmp_path / "new", rows, group=4))


def test_fewer_rows_are_refused(tmp_path):
    """A smaller limit, or another file."""
    rows = [prompt(index) for index in range(4)]
    with pytest.raises(ResumeRefused, match="planned with 4 prompts, now there are 3"):
        check_growth(write(tmp_path / "stored", rows), write(tmp_path / "new", rows[:3]))


def test_other_readers_understand_it(tmp_path):
    """A plan is plain Parquet, and a copy is as good."""
    write(tmp_path / "plan.parquet", [prompt(0), prompt(1)])
    shutil.copy(tmp_path / "plan.parquet", tmp_path / "copy.parquet")
    table = pq.read_table(tmp_path / "copy.parquet")
    assert table.schema.equals(PLAN_SCHEMA)
    assert json.loads(table.column("metadata")[1].as_py()) == {"a": 1}
    assert table.column("prompt_token_ids").to_pylist() == [[], [0]]
