"""Packages add to this one by entry points, and what is built in is registered in the same way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparring.pipeline import plugins
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.registry import make, names

GAME = """
from sparring.pipeline.games.goal import Goal

class Corridor(Goal):
    name = "corridor"

    def __init__(self, areas: int, length: int = 3) -> None:
        super().__init__(areas)
        self.length = length
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    forget()


def forget() -> None:
    for cached in (plugins.names, plugins.load, plugins._found):
        cached.cache_clear()


def install(site: Path, package: str, entries: str, code: str = GAME) -> None:
    """Puts a package with entry points there, as an installer does."""
    (site / f"{package}.py").write_text(code)
    folder = site / f"{package}-1.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (folder / "entry_points.txt").write_text(f"[sparring.simulators]\n{entries}\n")
    forget()


def test_simulator_of_a_package_is_one_of_all(site: Path) -> None:
    built_in = names()
    install(site, "corridors", "corridor = corridors:Corridor")
    assert names() == (*built_in, "corridor")
    assert make("corridor", 2, length=5).length == 5  # type: ignore[attr-defined]
    with pytest.raises(SettingsError, match="option 'len' for 'corridor'; expected one of length; did you mean"):
        make("corridor", 1, len=5)


def test_package_that_cannot_be_imported_is_named(site: Path) -> None:
    install(site, "broken", "wall = broken:Wall", "import no_such_module")
    expected = r"got 'wall' of the package broken 1.2, whose broken:Wall cannot be imported \(ModuleNotFoundError: No"
    with pytest.raises(SettingsError, match=expected):
        make("wall", 1)
    assert make("goal", 1).behaviors()


def test_name_of_two_packages_is_refused_with_both(site: Path) -> None:
    install(site, "first", "corridor = first:Corridor")
    install(site, "second", "corridor = second:Corridor")
    with pytest.raises(SettingsError, match=r"of the package first 1.2, the package second 1.2 in sparring.simulators"):
        make("corridor", 1)


def test_installation_without_entry_points_is_named() -> None:
    with pytest.raises(SettingsError, match=r"got an installation without sparring.none; .* install it anew"):
        plugins.names("sparring.none")


@pytest.mark.slow
def test_simulator_of_a_package_is_checked_and_tried_by_the_commands(site: Path) -> None:
    install(site, "corridors", "corridor = corridors:Corridor")
    config = site / "config.yaml"
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}

    def run(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "sparring", *words]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        return ended.returncode, ended.stdout + ended.stderr

    config.write_text("behaviors: {Goal: {}}\nsimulators:\n  - {name: corridor, options: {len: 3}}\n")
    status, text = run("check", str(config))
    assert (status, "config.yaml:3: simulators[0].options.len" in text) == (1, True), text
    config.write_text("behaviors: {Goal: {}}\nsimulators:\n  - {name: corridor, options: {length: 3}}\n")
    assert run("check", str(config))[0] == 0
    status, text = run("try", "corridor", "--option", "length=4")
    assert status == 0, text
