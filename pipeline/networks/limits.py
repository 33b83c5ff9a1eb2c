"""This module checks, without building one, for what networks can be built: stepping does so at a simulator's Hello."""

from __future__ import annotations

from typing import Final

from sparring.pipeline.errors import ExplainedError, SettingsError
from sparring.pipeline.networks.settings import NetworkSettings, VisualEncoder
from sparring.pipeline.specs import BehaviorSpec, ObservationSpec

HEADS: Final = 4
"""Heads of the attention over entities and over group members."""

SMALLEST: Final[dict[VisualEncoder, int]] = {
    "simple": 20,
    "nature_cnn": 36,
    "resnet": 15,
    "match3": 5,
    "fully_connected": 1,
}
"""Fewest pixels of an image's height and width, so that something is left after the last convolution (ML-Agents)."""


class Unsupported(ExplainedError, SettingsError):
    """Reports that the settings or a behavior's spec need what cannot be built."""


def refuse_unsupported(spec: BehaviorSpec, settings: NetworkSettings) -> None:
    """Refuses a spec and settings for which no network can be built.

    Raises:
        Unsupported: names the observation or setting.
    """
    for observation in spec.observations:
        if observation.kind == "image":
            _check_size(observation, settings)
        if observation.kind == "entities" and settings.hidden_units % HEADS:
            raise Unsupported(
                got=f"hidden_units {settings.hidden_units} with entities {observation.name!r}",
                expected=f"a multiple of {HEADS}, one part for each attention head",
                remedy=f"set network_settings.hidden_units to {-(-settings.hidden_units // HEADS) * HEADS}",
            )
    if all(one.kind == "goal" for one in spec.observations) and settings.goal_conditioning_type == "hyper":
        raise Unsupported(
            got="goal observations alone, with goal_conditioning_type 'hyper'",
            expected="another observation, whose processing the goal can condition",
            remedy="set network_settings.goal_conditioning_type to none, so that goals are read as vectors",
        )


def _check_size(image: ObservationSpec, settings: NetworkSettings) -> None:
    """Refuses an image of which nothing is left after the last convolution."""
    smallest, (_, height, width) = SMALLEST[settings.vis_encode_type], image.shape
    if min(height, width) < smallest:
        fitting = [kind for kind, size in SMALLEST.items() if size <= min(height, width)]
        raise Unsupported(
            got=f"image {image.name!r} of {height} x {width} pixels with vis_encode_type {settings.vis_encode_type!r}",
            expected=f"at least {smallest} x {smallest}",
            remedy=f"send a larger image, or set network_settings.vis_encode_type to one of {fitting}",
        )
