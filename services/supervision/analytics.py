"""Training analytics: what the telemetry of ML-Agents' package is told of a run, where its user wants that.

A game plays the same without. The package hands it to its vendor's analytics, which in the editor follow that one's
own preferences. Nothing of it is a free text of ours, but for names of behaviors.
"""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import TYPE_CHECKING

from sparring.pipeline.bridges.unity import Unreadable
from sparring.pipeline.bridges.unity.channels import analytics
from sparring.pipeline.bridges.unity.messages import messages
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.settings import Settings
from sparring.pipeline.settings.parameters import Curriculum

if TYPE_CHECKING:
    from google.protobuf.message import Message


def training(settings: Settings, players: int) -> bytes:
    """Side channel bytes that say what is trained and how: once of the run, then of each behavior.

    Args:
        settings: of the run.
        players: how many Unity players it has.

    Raises:
        SettingsError: protobuf is not installed.
    """
    try:
        kinds = messages()
    except Unreadable as error:
        raise SettingsError(
            f"got pipeline.training_analytics without {error}; expected that for it; {error.remedy}"
        ) from error
    own, parameters = f"sparring {version('sparring')}", settings.environment_parameters
    told = [
        kinds.environment_initialized(
            mlagents_version=own,
            mlagents_envs_version=own,
            python_version=platform.python_version(),
            torch_version=version("torch"),
            torch_device_type=settings.torch_settings.device or "cpu",
            num_envs=players,
            num_environment_parameters=len(parameters),
        )
    ]
    taught = {
        lesson.completion_criteria.behavior
        for parameter in parameters.values()
        if isinstance(parameter, Curriculum)
        for lesson in parameter.curriculum
        if lesson.completion_criteria is not None
    }
    for name, behavior in settings.behaviors.items():
        network, signals = behavior.network_settings, behavior.reward_signals.named()
        told.append(
            kinds.behavior_initialized(
                behavior_name=name,
                trainer_type=behavior.trainer_type,
                extrinsic_reward_enabled="extrinsic" in signals,
                gail_reward_enabled="gail" in signals,
                curiosity_reward_enabled="curiosity" in signals,
                rnd_reward_enabled="rnd" in signals,
                behavioral_cloning_enabled=behavior.behavioral_cloning is not None,
                recurrent_enabled=network.memory is not None,
                visual_encoder=network.vis_encode_type,
                num_network_layers=network.num_layers,
                num_network_hidden_units=network.hidden_units,
                trainer_threaded=settings.mode == "overlap",
                self_play_enabled=behavior.self_play is not None,
                curriculum_enabled=name in taught,
            )
        )
    return b"".join(map(_packed, told))


def _packed(message: Message) -> bytes:
    from google.protobuf.any_pb2 import Any

    packed = Any()
    packed.Pack(message)
    return analytics(packed.SerializeToString())
