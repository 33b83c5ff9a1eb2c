"""Combines the settings of a run, whose parts are beside the code that they configure.

`load` reads a YAML file in ML-Agents' terms and ours, merges and renames; `document` knows the lines, the models
validate, `conflicts` finds contradictions, and `explain` words the errors.
"""

from sparring.pipeline.settings.load import parse_settings, read
from sparring.pipeline.settings.model import Settings
from sparring.pipeline.settings.simulators import SimulatorSettings
from sparring.pipeline.settings.support import no_device, not_here, started_by_hand, without_effect

__all__ = [
    "Settings",
    "SimulatorSettings",
    "no_device",
    "not_here",
    "parse_settings",
    "read",
    "started_by_hand",
    "without_effect",
]
