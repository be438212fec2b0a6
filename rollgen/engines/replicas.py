"""Several engines of one host: which devices each has.

An engine's processes see the devices that an environment variable names when they are started: `CUDA_VISIBLE_DEVICES`,
or what it is called on that platform.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollgen.errors import UsageError


def device_groups(visible: Sequence[str], replicas: int, per_replica: int) -> list[str]:
    """For each replica the devices it has, as the environment variable lists them: neighbours, which are best linked.

    Raises UsageError when there are not enough.
    """
    if len(visible) < replicas * per_replica:
        raise UsageError(
            f"--replicas {replicas}: {replicas * per_replica} devices are needed, {per_replica} each, and "
            f"{len(visible)} are visible; use fewer replicas or smaller parallel sizes"
        )
    starts = range(0, replicas * per_replica, per_replica)
    return [",".join(visible[start : start + per_replica]) for start in starts]
