"""The policies that come with ms_kungfu. Pure, like their base in `ms_kungfu.elastic.policy`; docs/policies.md"""

from ms_kungfu.elastic.policies.noise_scale import NoiseScaleLearningRate, NoiseScalePolicy
from ms_kungfu.elastic.policies.schedule import SchedulePolicy
from ms_kungfu.elastic.policies.straggler import StragglerPolicy
from ms_kungfu.elastic.policies.throughput import ThroughputPolicy

__all__ = ["NoiseScaleLearningRate", "NoiseScalePolicy", "SchedulePolicy", "StragglerPolicy", "ThroughputPolicy"]
