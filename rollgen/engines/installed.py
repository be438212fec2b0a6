"""What the manifest says of an engine that is installed here, without loading it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import Final

from rollgen.errors import UsageError
from rollgen.format.manifest import EngineRecord

VERSIONED: Final = ("torch", "transformers", "triton", "flashinfer-python")
"""Packages that decide numbers."""
PROCESSORS: Final = {"vllm": "temperature, min_p, top_k, top_p"}
"""The order in which an engine truncates, where it has one (`vllm/v1/worker/gpu/sample/sampler.py`)."""
_UNKNOWN: Final = "unspecified"


def installed_engine(name: str) -> EngineRecord:
    """The record of a package, by its import or distribution name. Raises UsageError when it is not installed.

    The device is not looked at: that would initialise it in this process.
    """
    for distribution in filter(None, (name, *packages_distributions().get(name, ()))):
        if (found := _version(distribution)) is not None:
            return EngineRecord(
                name=name,
                version=found,
                device=_UNKNOWN,
                versions=package_versions(),
                processors=PROCESSORS.get(name, _UNKNOWN),
            )
    raise UsageError(f"engine: {name!r} is not installed here; give an EngineRecord that says what samples")


def package_versions() -> dict[str, str]:
    """Of the packages in VERSIONED that are installed."""
    return {package: found for package in VERSIONED if (found := _version(package)) is not None}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
