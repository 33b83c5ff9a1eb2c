"""The scripts of the page are modules that parse."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sparring.pipeline.monitoring import curves
from sparring.services.page.server import ASSETS

NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.parametrize("path", sorted(ASSETS.glob("*.js")), ids=lambda path: path.name)
def test_script_parses(path: Path) -> None:
    assert NODE is not None
    command = [NODE, "--input-type=module", "--check"]
    done = subprocess.run(command, input=path.read_bytes(), capture_output=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr.decode()


def luminance(color: str) -> float:
    """Of a color `#rrggbb`, as WCAG 2.2 defines it."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [r":root {", r':root[data-theme="dark"] {'])
def test_texts_have_the_contrast_that_wcag_asks_for(theme: str) -> None:
    rules = (ASSETS / "page.css").read_text().split(theme)[1].split("}")[0]
    colors = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", rules))
    for text in ("ink", "soft", "accent", "good", "bad", "warn"):
        for ground in ("paper", "card"):
            low, high = sorted((luminance(colors[text]), luminance(colors[ground])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


def test_colors_that_mean_something_are_of_the_palette_for_the_color_blind() -> None:
    for name in ("pipeline", "league", "watch", "curves"):
        found = set(re.findall(r'"(#[0-9a-f]{6})"', (ASSETS / f"{name}.js").read_text()))
        fills = {"#2f6b4f", "#5b6570", "#ffffff", "#10151b"} if name == "watch" else set()
        assert found - fills <= set(curves.COLORS), name


def test_scripts_write_no_text_as_html() -> None:
    for path in ASSETS.glob("*.js"):
        if path.name != "uplot.js":
            text = path.read_text().replace("http://www.w3.org/2000/svg", "")
            banned = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "http:")
            assert not [one for one in banned if one in text], path
