"""The scripts of the page are modules that parse."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sparring.services.page.server import ASSETS

NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.parametrize("path", sorted(ASSETS.glob("*.js")), ids=lambda path: path.name)
def test_script_parses(path: Path) -> None:
    assert NODE is not None
    command = [NODE, "--input-type=module", "--check"]
    done = subprocess.run(command, input=path.read_bytes(), capture_output=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_scripts_write_no_text_as_html() -> None:
    for path in ASSETS.glob("*.js"):
        if path.name != "uplot.js":
            text = path.read_text().replace("http://www.w3.org/2000/svg", "")
            banned = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "http:")
            assert not [one for one in banned if one in text], path
