"""Slots of writers: had for a moment, or by another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rollgen.format.commit import WHOLE, Part, WriterSlot
from rollgen.format.journal import JournalLine

LINE = JournalLine("part-w0-000000.parquet", 100, "a" * 64, "b" * 64, 1, 2, 3)
"""Of a shard that is nowhere."""
HOLDER = """
import sys
from pathlib import Path
from rollgen.format.commit import Part, WriterSlot

with WriterSlot(Path(sys.argv[1]), sys.argv[2], Part(int(sys.argv[3]), int(sys.argv[4]))):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold_slot(directory: Path, writer: str, part: Part = WHOLE) -> subprocess.Popen[str]:
    """Another process that has the slot until its stdin is closed or it is killed."""
    command = [sys.executable, "-c", HOLDER, str(directory), writer, *map(str, part)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def take_slot(directory: Path, writer: str, part: Part = WHOLE) -> None:
    with WriterSlot(directory, writer, part):
        pass
