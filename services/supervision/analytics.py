"""Training analytics: describes a run to the telemetry of ML-Agents' package, where the user asks for that.

A game plays the same without it. The package passes the description on to its vendor's analytics, which in the editor
follow the vendor's own preferences. The names of the behaviors are the only text in it that the user has written.
"""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import TYPE_CHECKING

from sparring.pipeline.bridges.unity import UnreadableData
from sparring.pipeline.bridges.unity.channels import analytics
from sparring.pipeline.bridges.unity.messages import message_class
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.settings import Settings
from sparring.pipeline.settings.parameters import Curriculum

if TYPE_CHECKING:
    from google.protobuf.message import Message


def training(settings: Settings, players: int) -> bytes:
    """Returns side channel bytes that describe the run, then each behavior and how it is trained.

    Args:
        settings: of the run.
        players: number of Unity players.

    Raises:
        SettingsError: protobuf is not installed.
    """
    try:
        environment_initialized = message_class("TrainingEnvironmentInitialized")
        behavior_initialized = message_class("TrainingBehaviorInitialized")
    except UnreadableData as error:
        raise SettingsError(f"got pipeline.training_analytics without {error}; expected it; {error.remedy}") from error
    own, parameters = f"sparring {version('sparring')}", settings.environment_parameters
    records = [
        environment_initialized(
            mlagents_version=own,
            mlagents_envs_version=own,
            python_version=platform.python_version(),
            torch_version=version("torch"),
            torch_device_type=settings.torch_settings.of_learner(next(iter(settings.behaviors), "")) or "cpu",
            num_envs=players,
            num_environment_parameters=len(parameters),
        )
    ]
    measured = {
        lesson.completion_criteria.behavior
        for parameter in parameters.values()
        if isinstance(parameter, Curriculum)
        for lesson in parameter.curriculum
        if lesson.completion_criteria is not None
    }
    for name, behavior in settings.behaviors.items():
        network, signals = behavior.network_settings, behavior.reward_signals.named()
        records.append(
            behavior_initialized(
                behavior_name=name,
                trainer_type=behavior.trainer_type,
                **{f"{kind}_reward_enabled": kind in signals for kind in ("extrinsic", "gail", "curiosity", "rnd")},
                behavioral_cloning_enabled=behavior.behavioral_cloning is not None,
                recurrent_enabled=network.memory is not None,
                visual_encoder=network.vis_encode_type,
                num_network_layers=network.num_layers,
                num_network_hidden_units=network.hidden_units,
                trainer_threaded=settings.mode == "overlap",
                self_play_enabled=behavior.self_play is not None,
                curriculum_enabled=name in measured,
            )
        )
    return b"".join(map(_packed, records))


def _packed(message: Message) -> bytes:
    from google.protobuf.any_pb2 import Any

    packed = Any()
    packed.Pack(message)
    return analytics(packed.SerializeToString())
