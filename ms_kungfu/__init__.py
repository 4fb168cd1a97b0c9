"""Elastic data-parallel training for stock MindSpore."""

from __future__ import annotations

from ._checkout import use_installed_build as _use_installed_build

_use_installed_build(globals())
