"""Decide which gradients are reduced together, in fusion groups as in MindSpore's `comm_fusion`.

See docs/fusion.md. Each of these two lines prints the groups. The second line is a command::

    print(optimizer.fusion_plan())
    python -m ms_kungfu.fusion train.py
"""

from ms_kungfu.fusion.mode import Mode, configured, parse
from ms_kungfu.fusion.plan import Gradient, Group, Plan, make_plan

__all__ = ["Gradient", "Group", "Mode", "Plan", "configured", "make_plan", "parse"]
