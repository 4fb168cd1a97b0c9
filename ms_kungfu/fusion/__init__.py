"""Decide which gradients are reduced together, in fusion groups as in MindSpore's `comm_fusion`.

See docs/fusion.md. This line and this command both print the groups::

    print(optimizer.fusion_plan())
    python -m ms_kungfu.fusion train.py
"""

from ms_kungfu.fusion.mode import Mode, configured, parse
from ms_kungfu.fusion.plan import Gradient, Group, Plan, make_plan

__all__ = ["Gradient", "Group", "Mode", "Plan", "configured", "make_plan", "parse"]
