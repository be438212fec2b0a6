"""How many connections may be open at a time, and that the system's soft limit is raised for them."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from rollgen.engines.descriptors import limit_for

ENDLESS = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        pytest.param(2000, 4096, (2000, 1164), id="enough"),
        pytest.param(ENDLESS, ENDLESS, (ENDLESS, 1164), id="no limit"),
        pytest.param(1024, 4096, (1420, 1164), id="raised as far as is needed"),
        pytest.param(1024, ENDLESS, (1420, 1164), id="raised without a hard limit"),
        pytest.param(1024, 1024, (1024, 768), id="the hard limit binds"),
        pytest.param(1024, 1200, (1200, 944), id="raised to a hard limit that binds"),
        pytest.param(100, 100, (100, 1), id="hardly any"),
    ],
)
def test_limits(soft: int, hard: int, expected: tuple[int, int]) -> None:
    """Three servers with 384 + 4 connections are 1,164, and 256 descriptors are for everything else."""
    assert limit_for(3 * 388, soft, hard) == expected


def test_this_process() -> None:
    """In one of its own: 900 connections where the limits are 1,024 and 1,100 raise the first and get 844."""
    program = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1100))
from rollgen.engines.descriptors import afford
print(afford(100), resource.getrlimit(resource.RLIMIT_NOFILE), afford(900), resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=180)
    assert done.stdout.strip() == "100 (1024, 1100) 844 (1100, 1100)"
