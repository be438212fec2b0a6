"""`make bench`: all benchmarks of this folder, one after the other."""

from __future__ import annotations

import platform
import sys
from importlib import import_module
from importlib.metadata import version

print(f"{platform.platform()}, Python {platform.python_version()}, pyarrow {version('pyarrow')}")
sys.argv = sys.argv[:1]
for name in ("size", "pipeline", "memory", "ops", "loading", "verify", "engines"):
    print(f"\n== {name}")
    sys.stdout.flush()
    import_module(f"tests.benchmarks.{name}").main()
