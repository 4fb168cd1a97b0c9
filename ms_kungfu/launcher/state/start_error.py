"""Define the error of a job that can't start."""

from __future__ import annotations


class StartError(Exception):
    """The job can't start; the message is for the user."""
