"""The engine's record, taken from what is installed."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from rollgen.engines.installed import installed_engine, package_versions
from rollgen.errors import UsageError


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_a_distribution_by_its_name(name: str) -> None:
    """Its version, and those of what decides numbers; nobody looked at the device."""
    record = installed_engine(name)
    assert (record.name, record.version, record.device) == (name, version(name), "unspecified")
    assert record.versions == package_versions()
    assert record.versions["torch"] == version("torch")


def test_a_package_of_another_distribution() -> None:
    """As vLLM for CPUs: what is imported as `yaml` is installed as PyYAML."""
    assert installed_engine("yaml").version == version("PyYAML")


@pytest.mark.vllm
def test_vllm_is_known_by_its_order() -> None:
    """Whatever distribution it came from."""
    assert installed_engine("vllm").processors == "temperature, min_p, top_k, top_p"


def test_what_is_not_installed() -> None:
    """A record of the user's own says more than a name."""
    with pytest.raises(UsageError, match="engine: 'no_such_engine' is not installed here; give an EngineRecord"):
        installed_engine("no_such_engine")
