"""The networks of the benchmarks, with their data; :func:`group` selects some by name.

``published`` has the networks whose memory others published.
"""

from benchmarks.networks.groups import GROUPS, group
from benchmarks.networks.record import MIB, Network, Part, Sample
from benchmarks.networks.trainings import host_training, project

__all__ = ["GROUPS", "MIB", "Network", "Part", "Sample", "group", "host_training", "project"]
