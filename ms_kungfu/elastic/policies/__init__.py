"""Define the policies of ms_kungfu; see docs/policies.md.

The policies are pure, like their base class in `ms_kungfu.elastic.policy`.
"""

from ms_kungfu.elastic.policies.noise_scale import NoiseScaleLearningRate, NoiseScalePolicy
from ms_kungfu.elastic.policies.schedule import SchedulePolicy
from ms_kungfu.elastic.policies.straggler import StragglerPolicy
from ms_kungfu.elastic.policies.throughput import ThroughputPolicy

__all__ = ["NoiseScaleLearningRate", "NoiseScalePolicy", "SchedulePolicy", "StragglerPolicy", "ThroughputPolicy"]
