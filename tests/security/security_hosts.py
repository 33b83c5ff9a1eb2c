"""Settings of runs on several machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sparring.pipeline.settings import Settings, SimulatorSettings, parse_settings


def with_hosts(hosts: Mapping[str, Any], **rest: Any) -> Settings:
    document = {"behaviors": {"Ball": {}}, "pipeline": {"hosts": hosts, **rest}}
    return parse_settings(json.dumps(document), "run.yaml").settings


def three_machines() -> Settings:
    hosts = {
        "desk": {"address": "127.0.0.1"},
        "rack": {"address": "10.9.9.2", "services": ["stepping-1", "stepping-2"]},
        "tower": {"address": "10.9.9.3", "services": ["learning"]},
    }
    simulators = (
        SimulatorSettings(name="balance", count=3, host="rack"),
        SimulatorSettings(name="balance", count=1),
        SimulatorSettings(name="balance", count=2, host="tower"),
    )
    return with_hosts(hosts, stepping_processes=3, port=27_000).model_copy(update={"simulators": simulators})
