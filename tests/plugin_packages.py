"""Packages that are installed for a test."""

from __future__ import annotations

from pathlib import Path


def install(site: Path, package: str, group: str, entries: str, code: str) -> None:
    """Puts a package with a module of its name and entry points into a folder, as an installer does."""
    (site / f"{package}.py").write_text(code)
    folder = site / f"{package}-1.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (folder / "entry_points.txt").write_text(f"[{group}]\n{entries}\n")
