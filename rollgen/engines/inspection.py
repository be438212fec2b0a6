"""What a server was found to be before the first prompt, and whether it still is that.

Its own word (`server.py`) costs nothing and is asked for often; the probe (`probe.py`) costs some tokens and waits in
the server's queue. A server that was fit and now answers nonsense is away: in front of it may be a gateway that has
nothing behind it for a while. One that answers, and is another one, is unfit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rollgen.engines.address import Address
from rollgen.engines.probe import Findings, Probe, Wanted
from rollgen.engines.server import UNKNOWN, KeyRefused, ServerModel, describe_server
from rollgen.engines.wire import Oversized, Refused, Unreachable, Wire
from rollgen.errors import EngineError, UnfitEngine, UsageError
from rollgen.inert import brief

HEALTH_PATH: Final = "/health"


class Inspection:
    """Of one server, for one run. Problems are told without its address."""

    def __init__(self, address: Address, make_probe: Callable[[Wire, ServerModel, Wanted], Probe]) -> None:
        self._address = address
        self._make_probe = make_probe
        self._knows_health = False
        self.model: ServerModel
        self.findings: Findings

    async def first(self, wanted: Wanted) -> None:
        """Fill `model` and `findings`. Raises UsageError for a server that is of no use, EngineError for none."""
        async with Wire(self._address) as wire:
            self.model = await describe_server(wire, self._address)
            self._knows_health = await _answers_health(wire)
            self.findings = await self._make_probe(wire, self.model, wanted).run()

    async def changed(self, wire: Wire) -> str | None:
        """Why the server does not say that it is what it was; None when it does.

        Raises UnfitEngine for another one, and for one that does not take our key any more.
        """
        try:
            model = await describe_server(wire, self._address)
        except KeyRefused as error:
            raise UnfitEngine(str(error)) from None
        except (UsageError, EngineError) as error:
            return self._bare(error)
        if model.version == UNKNOWN != self.model.version:
            return "it does not tell its version"
        if model != self.model:
            raise UnfitEngine(
                f"{self._address}: is back with another model, context or version: {brief(str(model))}, it was "
                f"{brief(str(self.model))}"
            )
        return None

    async def problem(self, wire: Wire, *, thorough: bool) -> str | None:
        """Why the server takes no requests, or None; thorough: it is probed. Raises UnfitEngine as `changed`, and for
        one that was started with other flags."""
        problem = await self._health_problem(wire) or await self.changed(wire)
        if problem is not None or not thorough:
            return problem
        try:
            findings = await self._make_probe(wire, self.model, self.findings.capture).run()
        except EngineError as error:
            return self._bare(error)
        except UsageError as error:
            if (problem := await self.changed(wire)) is not None:
                return problem
            raise UnfitEngine(str(error)) from None
        if findings.extras != self.findings.extras:
            raise UnfitEngine(
                f"{self._address}: is back with other flags: {findings.extras}, it had {self.findings.extras}"
            )
        self.findings = findings
        return None

    async def _health_problem(self, wire: Wire) -> str | None:
        """A front that never knew `/health` answers, at least."""
        try:
            await wire.get(HEALTH_PATH)
        except Unreachable as error:
            return str(error)
        except Refused as refused:
            is_away = refused.status >= 500 or self._knows_health
            return f"it answers {HEALTH_PATH} with {refused}" if is_away else None
        except Oversized:
            return None
        return None

    def _bare(self, error: Exception) -> str:
        return str(error).removeprefix(f"{self._address}: ")


async def _answers_health(wire: Wire) -> bool:
    try:
        await wire.get(HEALTH_PATH)
    except (Unreachable, Refused, Oversized):
        return False
    return True
