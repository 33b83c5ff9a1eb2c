"""What every service of a run imports: a fork server loads this module once, before it forks them."""

import importlib
from typing import Final

STAGES: Final = ("stepping", "assembly", "coordination", "learning", "monitor")

importlib.import_module("sparring.services.commands.service")
for _stage in STAGES:
    importlib.import_module(f"sparring.services.stages.{_stage}")
