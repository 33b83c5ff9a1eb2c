"""Settings of a run: the parts live beside what they configure, and are combined here.

`load` reads a YAML file in ML-Agents' language and ours; `document` knows the lines, `normal` merges
and renames, the models decide, `explain` says what they refuse.
"""

from pipeline.settings.behavior import BehaviorSettings
from pipeline.settings.load import Loaded, load, parse_settings, read
from pipeline.settings.model import Settings
from pipeline.settings.normal import Overrides
from pipeline.settings.simulators import SimulatorSettings
from pipeline.settings.support import no_device, not_here, started_by_hand, without_effect

__all__ = [
    "BehaviorSettings",
    "Loaded",
    "Overrides",
    "Settings",
    "SimulatorSettings",
    "load",
    "no_device",
    "not_here",
    "parse_settings",
    "read",
    "started_by_hand",
    "without_effect",
]
