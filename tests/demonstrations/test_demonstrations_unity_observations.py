"""Observations of `.demo` files: kinds, names, layouts, PNG images, and the libraries that read them."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import tests.demonstrations.demo_writer as writer
from sparring.pipeline.bridges.unity import messages as schema
from sparring.pipeline.errors import install_command
from sparring.pipeline.specs import ObservationSpec
from tests.demonstrations.demo_reading import (
    CHW,
    HWC,
    as_png,
    one_step,
    pixels,
    read,
    refusal,
)
from tests.unity.protobuf_writer import NONE, VARIABLE


def test_observations_have_the_kinds_and_names_of_their_sensors() -> None:
    """Names come from the file; a missing name is that of its position, and a repeated one gets a number."""
    seen = [
        writer.vector([1.0], name="eye"),
        writer.vector([1.0, 2.0], name="eye", kind=1),
        writer.floats(range(6), [3, 2], [VARIABLE, NONE]),
        writer.floats(range(12), [2, 3, 2], CHW, name="map"),
    ]
    found = read(one_step(seen))
    assert found.spec.observations == (
        ObservationSpec(name="eye", shape=(1,)),
        ObservationSpec(name="eye_2", shape=(2,), kind="goal"),
        ObservationSpec(name="obs_2", shape=(3, 2), kind="entities"),
        ObservationSpec(name="map", shape=(2, 3, 2), kind="image"),
    )
    np.testing.assert_array_equal(found.columns["observation.2"][0], np.arange(6).reshape(3, 2))
    np.testing.assert_array_equal(found.columns["observation.3"][0], np.arange(12).reshape(2, 3, 2))


@pytest.mark.parametrize("axes", [HWC, (), (0, 0, 0)])
def test_images_with_channels_last_are_transposed(axes: tuple[int, ...]) -> None:
    image = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    found = read(one_step([writer.floats(image.ravel().tolist(), image.shape, axes)]))
    assert found.spec.observations[0].shape == (2, 2, 3)
    np.testing.assert_array_equal(found.columns["final_observation.0"][0], image.transpose(2, 0, 1))


@pytest.mark.parametrize("channels", [2, 3, 6, 7])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_png_images_keep_their_bytes(channels: int, last: bool, mapped: bool) -> None:
    """This holds for one and several files, both layouts, with and without a mapping; padding is left out."""
    image = pixels(channels)
    shape, axes = ([4, 5, channels], HWC) if last else ([channels, 4, 5], CHW)
    mapping = [*range(channels), *[-1] * (-channels % 3)] if mapped else []
    found = read(one_step([writer.packed(as_png(image), shape, axes, mapping)]))
    assert found.spec.observations[0] == ObservationSpec(
        name="obs_0", shape=(channels, 4, 5), dtype="uint8", kind="image"
    )
    np.testing.assert_array_equal(found.columns["observation.0"][0], image)


def test_the_mapping_reorders_channels() -> None:
    image = pixels(6)
    found = read(one_step([writer.packed(as_png(image), [3, 4, 5], CHW, [2, -1, 0, -1, 1, -1])]))
    np.testing.assert_array_equal(found.columns["observation.0"][0], image[[2, 4, 0]])


@pytest.mark.parametrize("mapping", [[], [0, 0, 0]])
def test_channels_that_are_averaged_are_floats(mapping: list[int]) -> None:
    """A grayscale image has three channels in its PNG; their mean needs more than a byte."""
    image = pixels(3)
    found = read(one_step([writer.packed(as_png(image), [1, 4, 5], CHW, mapping)]))
    assert found.spec.observations[0].dtype == "float32"
    np.testing.assert_allclose(found.columns["observation.0"][0, 0], image.mean(axis=0) / 255, atol=1e-6)


def test_a_png_of_one_channel_gives_three_equal_channels() -> None:
    image = pixels(1)
    found = read(one_step([writer.packed(writer.png(image[0], "L"), [3, 4, 5], CHW)]))
    np.testing.assert_array_equal(found.columns["observation.0"][0], np.repeat(image, 3, axis=0))


@pytest.mark.parametrize("library", ["google.protobuf", "PIL"])
def test_a_missing_library_is_named_with_its_extra(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = as_png(pixels(3))  # pillow writes it
    schema.message_class.cache_clear()
    monkeypatch.setitem(sys.modules, library, None)
    name = {"google.protobuf": "protobuf", "PIL": "pillow"}[library]
    error = refusal(one_step([writer.packed(data, [3, 4, 5], CHW)]), f"no library {name}")
    assert error.remedy == install_command("unity")
