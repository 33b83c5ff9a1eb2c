"""Writes what an environment renders as an animated GIF."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from sparring.pipeline.bridges.explain import say, shown
from sparring.pipeline.bridges.making import import_optional
from sparring.pipeline.bridges.spaces import Value
from sparring.pipeline.errors import NOTICE, SettingsError
from sparring.pipeline.files import write_atomically

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_FRAMES: Final = 500
"""Frames of a video, which are in memory until it is written."""
_LARGEST: Final = 480
"""Pixels of the longer side, to which larger frames are reduced."""
_COLORS: Final = 64


class Video:
    """Wraps an environment, and writes what it renders before its first steps: once it is enough, or at the end.

    Args:
        environment: of one agent, or of several.
        path: of the file.
        frames_per_s: speed at which it is played.

    Raises:
        SettingsError: Pillow is not installed.
    """

    def __init__(self, environment: Value, path: str, frames_per_s: float) -> None:
        self._environment = environment
        self._images = import_optional("PIL.Image", "gymnasium")
        self._path = Path(path)
        self._frame_ms = round(1000 / max(1.0, min(50.0, frames_per_s)))  # viewers slow down shorter frames
        self._frames: list[Image] = []
        self._is_written = False

    def __getattr__(self, name: str) -> Value:
        return getattr(self._environment, name)

    def step(self, action: Value) -> Value:
        """Adds a frame, [height, width, 3] bytes, and steps the environment; None removes an agent, without a frame.

        Raises:
            SettingsError: the environment renders something else, or nothing.
        """
        if action is not None and not self._is_written:
            self._add()
        return self._environment.step(action)

    def close(self) -> None:
        """Writes the file, and closes the environment."""
        self._write()
        self._environment.close()

    def _add(self) -> None:
        frame = None
        with contextlib.suppress(NotImplementedError):
            frame = self._environment.render()
        pixels = np.asarray(frame)
        if pixels.ndim != 3 or pixels.shape[2] != 3:
            raise SettingsError(
                f"got {shown(frame)} from the environment's render(); expected an image [height, width, 3]; "
                "leave --video out, or add the render mode rgb_array to the environment"
            )
        image = self._images.fromarray(pixels.astype(np.uint8))
        image.thumbnail((_LARGEST, _LARGEST))
        self._frames.append(image.quantize(_COLORS, method=self._images.Quantize.FASTOCTREE))
        if len(self._frames) == MOST_FRAMES:
            self._write()

    def _write(self) -> None:
        """Writes the file, if there is a frame and it is not written yet."""
        if self._frames and not self._is_written:
            first, *others = self._frames
            content = io.BytesIO()
            first.save(content, "GIF", save_all=True, append_images=others, duration=self._frame_ms, loop=0)
            try:
                write_atomically(self._path, content.getvalue(), durable=False)
            except OSError as error:  # the episodes count all the same
                say(f"{NOTICE}the video is not written: {error}\n")
        self._is_written = True


def make_areas(
    make: Callable[..., Value], areas: int, wrappers: Sequence[Callable[[Value], Value]], video: str
) -> list[Value]:
    """Returns the wrapped environments of all areas.

    Args:
        make: makes an environment.
        areas: number of environments.
        wrappers: functions that wrap each, innermost first.
        video: file for a video of the first; only the first simulator of a run makes one. "" for none.

    Raises:
        SettingsError: the video is no GIF, or its folder does not exist.
    """
    if video and (Path(video).suffix.lower() != ".gif" or not Path(video).parent.is_dir()):
        raise SettingsError(
            f"got video={video!r}; expected a file .gif in a folder that exists; correct the simulator's options"
        )
    if os.environ.get("SPARRING_NUMBER", "0") != "0":
        video = ""
    plain = [make(render_mode="rgb_array") if video and not area else make() for area in range(areas)]
    envs = [reduce(lambda env, wrap: wrap(env), wrappers, env) for env in plain]
    if video:
        rate = (getattr(envs[0], "metadata", None) or {}).get("render_fps") or 30
        envs[0] = Video(envs[0], video, float(rate))
    return envs
