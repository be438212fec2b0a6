"""Where `--ray` says that a cluster is, and whether one answers there, before Ray itself is let loose on it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ray._common.utils import get_ray_address_file
from ray._private import services

from rollgen.cluster import probe
from rollgen.cluster.waiting import POLL_SECONDS, refuse_if
from rollgen.errors import UsageError

AUTO: Final = "auto"
LOCAL: Final = "local"
VARIABLE: Final = "RAY_ADDRESS"
PROBE_SECONDS: Final = 60.0
"""For the probe, which gives up by itself: this is for a machine that gives it no time."""
_GIVE: Final = "give host:port of the head, or use --ray local"
_START: Final = "start a cluster with `ray start --head`, " + _GIVE


@dataclass(frozen=True, slots=True)
class Address:
    """Of the head of a cluster."""

    given: str
    """What `--ray` says."""
    place: str
    """host:port"""
    source: str = ""
    """Where `auto` has it from."""

    def __str__(self) -> str:
        return f"at {self.place} (from {self.source})" if self.source else "there"

    @property
    def is_found(self) -> bool:
        """Whether it is Ray that knows of it, and no person who says so."""
        return self.source not in ("", VARIABLE)

    @property
    def fix(self) -> str:
        """What to do when no cluster answers there."""
        if self.is_found:
            return _START
        return "unset it, " + _GIVE if self.source else "give host:port of its head, auto, or local"


def resolve(given: str) -> Address | None:
    """What `--ray` means here; None when Ray is to be started. Raises UsageError with the fix.

    `auto` is what it is to Ray: what RAY_ADDRESS says, else a cluster that this node is part of, else the last one.
    """
    place, source = _found() if given == AUTO else (given, "")
    if place == LOCAL:
        return None
    named = f"--ray {given}: {source} says {place}" if source else f"--ray {given}"
    if "://" in place:
        raise UsageError(
            f"{named}: a client cannot commit shards; start rollgen on a node of the cluster, for example with `ray "
            "job submit`"
        )
    if ":" not in place:
        raise UsageError(f"{named}: no address; give host:port of the head of a cluster, auto, or local")
    return Address(given, place, source)


def check(address: Address, given_up: Callable[[], bool]) -> None:
    """Raise UsageError when no head of a cluster answers there that would let us in, and EngineError as `refuse_if`."""
    code, why = _probed(address, given_up)
    if code == probe.NO_TOKEN:
        raise UsageError(
            f"--ray {address.given}: the cluster {address} wants its token: {why}; set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the token of the cluster (~/.ray/auth_token on its head)"
        )
    if code == probe.NO_HEAD:
        why = f"what listens is no head ({why}), whose port is 6379 unless it was told another, not 8265 or 10001"
    if code != 0:
        raise UsageError(f"--ray {address.given}: no cluster answers {address}: {why}; {address.fix}")


def _found() -> tuple[str, str]:
    """The address that Ray would find, and where. Raises UsageError."""
    named = os.environ.get(VARIABLE, "")
    if named not in ("", AUTO):
        return named, VARIABLE
    services.find_gcs_addresses.cache_clear()  # type: ignore[attr-defined]
    try:
        place = services.get_ray_address_from_environment(AUTO, None)
    except ConnectionError:
        raise UsageError(f"--ray {AUTO}: no cluster runs here, and {VARIABLE} names none; {_START}") from None
    is_last = place == services.find_bootstrap_address(None)
    return place, get_ray_address_file(None) if is_last else "a process of Ray here"


def _probed(address: Address, given_up: Callable[[], bool]) -> tuple[int, str]:
    """Exit code and line of the probe."""
    host, _, port = address.place.rpartition(":")
    command = [sys.executable, "-P", probe.__file__, host.strip("[]"), port, *(["found"] if address.is_found else [])]
    deadline = time.monotonic() + PROBE_SECONDS
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while time.monotonic() < deadline:
                with suppress(subprocess.TimeoutExpired):
                    said, complaint = process.communicate(timeout=POLL_SECONDS)
                    lines = [*complaint.splitlines(), *said.splitlines()] or ["without a word"]
                    return process.returncode, lines[-1].rstrip(".")
                refuse_if(given_up)
        finally:
            process.kill()
    return probe.NO_HEAD, f"not within {PROBE_SECONDS:g} s"
