"""Which tests `make test` runs one after the other in one process, and what it begins with.

A file stays in one process: its tests share what they set up. Files with real vLLM are in CHAINS, since no more than
two of their tests at a time fit into memory; while these wait, other files are tested beside them. What takes long
comes first, so that no process is at work alone in the end.
"""

from __future__ import annotations

from xdist.scheduler.loadscope import LoadScopeScheduling

CHAINS = (
    "integration/test_ray integration/test_examples integration/test_s3 integration/test_sampling "
    "integration/test_own_loop integration/test_routed_experts integration/test_ties".split(),
    "integration/test_lifecycle integration/test_parallel integration/test_server integration/test_native "
    "engines/test_vllm_outputs".split(),
)
"""About as long as each other."""
LONG = (
    "remote/test_runs cluster/test_crew cluster/test_object_storage security/test_untrusted_text faults/test_damage "
    "faults/test_steps curate/test_workers curate/test_score_kills schema/test_hostile loop/test_stop"
).split()
"""Others that take half a minute or more."""
_CHAIN_OF = {file: f"chain {number}" for number, chain in enumerate(CHAINS) for file in chain}
_ORDER = {file: place for place, file in enumerate([*(file for chain in CHAINS for file in chain), *LONG])}


def place_of(nodeid: str) -> int:
    """What a test is sorted by: its file's place in CHAINS and LONG, or behind all of these."""
    return _ORDER.get(_file_of(nodeid), len(_ORDER))


class Schedule(LoadScopeScheduling):
    """xdist's `loadfile`, but that each chain is as one file."""

    def _split_scope(self, nodeid: str) -> str:
        file = _file_of(nodeid)
        return _CHAIN_OF.get(file, file)


def _file_of(nodeid: str) -> str:
    """Below tests/, without its ending."""
    return nodeid.partition("::")[0].removeprefix("tests/").removesuffix(".py")
