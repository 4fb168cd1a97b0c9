"""Why a job can't start."""

from __future__ import annotations


class StartError(Exception):
    """The job can't start; the message is for the user."""
