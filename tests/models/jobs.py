"""What a crew is handed, without the run around it."""

from __future__ import annotations

import numpy as np
from models.runs import Recorder

from rollgen.format.commit import WriterSlot
from rollgen.format.failures import FailureLog
from rollgen.format.manifest import Manifest
from rollgen.loop.crew import Job
from rollgen.loop.owed import Owed
from rollgen.loop.report import RunStats
from rollgen.preflight import Preflight, discretion_of
from rollgen.prompts.plan import Plan


def some_job(slot: WriterSlot, preflight: Preflight, manifest: Manifest, plan: Plan) -> Job:
    """All of a plan is owed, and one sample may fail."""
    return Job(
        slot=slot,
        preflight=preflight,
        manifest=manifest,
        owed=Owed(plan, [], np.zeros(plan.samples, np.bool_)),
        failures=FailureLog(slot.directory, slot.writer),
        discretion=discretion_of(preflight.config, slot.directory),
        stats=RunStats(),
        reporter=Recorder(),
        max_failures=1,
    )
