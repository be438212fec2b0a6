"""Whether the head of a Ray cluster answers: `python -P probe.py HOST PORT [found]`, a program of its own.

Ray asks whatever listens there for ever, in C++, where no signal reaches it, and complains on standard error: a process
that does nothing else can be ended at any time, and its standard error closed. It needs Ray, and nothing of rollgen.

Exits with 0 where a head answers. Else with one of the numbers below, and a line on standard output that says why.
`found` is said of an address that Ray has found on this machine: for such a one alone it looks for a token unasked.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Final

NOBODY: Final = 10
"""Nothing listens there."""
NO_HEAD: Final = 11
"""It is something else, or it is silent."""
NO_TOKEN: Final = 12
"""The cluster lets nobody in without its token."""
CONNECT_SECONDS: Final = 10
ANSWER_SECONDS: Final = 5
"""For the last of three steps in which Ray asks; the others take as long, unless Ray is configured otherwise."""


def main(host: str, port: str, *found: str) -> int:
    """Returns the exit code."""
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        print(error.strerror or error)
        return NOBODY
    except (ValueError, OverflowError) as error:
        print(error)
        return NOBODY
    os.environ.setdefault("RAY_py_gcs_connect_timeout_s", str(ANSWER_SECONDS))  # read on import
    return _ask(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", is_found=bool(found))


def _ask(address: str, *, is_found: bool) -> int:
    """As `ray.init` begins: the token, then the name of the cluster."""
    from ray._private.authentication import authentication_token_setup as tokens
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError, RayError

    try:
        if is_found:
            tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        tokens.ensure_token_if_auth_enabled(create_token_if_missing=False)
        GcsClient(address=address)
    except AuthenticationError as error:
        print(error.message)
        return NO_TOKEN
    except RayError as error:
        print(error)
        return NO_HEAD
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
