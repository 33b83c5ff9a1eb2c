"""What networks can be built for, known without building one: stepping asks when a simulator says Hello."""

from __future__ import annotations

from typing import Final

from sparring.pipeline.errors import Explained, SettingsError
from sparring.pipeline.networks.settings import NetworkSettings, VisualEncoder
from sparring.pipeline.specs import BehaviorSpec, ObservationSpec

HEADS: Final = 4
"""Of the attention over entities."""

SMALLEST: Final[dict[VisualEncoder, int]] = {
    "simple": 20,
    "nature_cnn": 36,
    "resnet": 15,
    "match3": 5,
    "fully_connected": 1,
}
"""Fewest pixels of an image's height and width, so that something is left after the last convolution (ML-Agents)."""


class Unsupported(Explained, SettingsError):
    """Something that the settings or a behavior's spec ask for and that cannot be built."""


def refuse_unsupported(spec: BehaviorSpec, settings: NetworkSettings) -> None:
    """Says what of a spec and of settings no network can be built for.

    Raises:
        Unsupported: there is such a thing.
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
            expected="another observation beside the goal, which conditions how it is read",
            remedy="set network_settings.goal_conditioning_type to none, which reads goals as vectors",
        )


def _check_size(image: ObservationSpec, settings: NetworkSettings) -> None:
    """Refuses an image that leaves nothing after the last convolution."""
    smallest, (_, height, width) = SMALLEST[settings.vis_encode_type], image.shape
    if min(height, width) < smallest:
        fitting = [kind for kind, size in SMALLEST.items() if size <= min(height, width)]
        raise Unsupported(
            got=f"image {image.name!r} of {height} x {width} pixels with vis_encode_type {settings.vis_encode_type!r}",
            expected=f"at least {smallest} x {smallest}",
            remedy=f"send a larger image, or set network_settings.vis_encode_type to one of {fitting}",
        )
