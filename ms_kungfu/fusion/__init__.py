"""Which gradients are reduced together: fusion groups in MindSpore's meaning of `comm_fusion`.

See docs/fusion.md. Both of these print the groups::

    print(optimizer.fusion_plan())
    python -m ms_kungfu.fusion train.py
"""

from ms_kungfu.fusion.mode import Mode, configured, parse
from ms_kungfu.fusion.plan import Gradient, Group, Plan, make_plan

__all__ = ["Gradient", "Group", "Mode", "Plan", "configured", "make_plan", "parse"]
