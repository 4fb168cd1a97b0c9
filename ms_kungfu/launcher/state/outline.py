"""Build the status document of a job that hasn't begun."""

from __future__ import annotations

import os
from typing import Any

from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.state.states import JobState, NodeState


def outline(options: Options, state: JobState, why: str, started_at: float) -> dict[str, Any]:
    """Return the status document with empty values for the job's details, which `describe` fills in."""
    return {
        "job": None,
        "state": state.value,
        "why": why,
        "launcher": {"host": options.host.name, "pid": os.getpid()},
        "started_at": started_at,
        "command": list(options.command),
        "follows_changes": options.watch,
        "config_server": None,
        "hosts": [{"name": name, "lost": False, "state": NodeState.ACTIVE.value} for name in options.hosts.names],
        "cluster": None,
        "wanted": None,
        "processes": [],
        "changes": [],
        "training": None,
        "stalls": [],
    }
