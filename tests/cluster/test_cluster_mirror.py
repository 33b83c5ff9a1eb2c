"""Copies of the files of a part: logs grow, and a checkpoint is there whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sparring.services.cluster import agent, mirror
from sparring.services.cluster.agent import Agent
from sparring.services.cluster.mirror import Mirror

pytestmark = pytest.mark.asyncio


class Node:
    """The folder of a part on a node."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(agent, "CHUNK", 7)
        self.agent = Agent("learning-A", node_address="127.0.0.1")
        self.folder = self.agent._folder
        self.here = folder
        self.mirror = Mirror(folder, "A")

    def write(self, name: str, content: str, mode: str = "w") -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode) as file:
            file.write(content)

    async def update(self) -> None:
        async def read(name: str, offset: int) -> bytes:
            return self.agent.read(name, offset)

        await self.mirror.update(self.agent._listing(), read)

    def found(self) -> dict[str, str]:
        paths = [path for path in self.here.rglob("*") if path.is_file()]
        return {path.relative_to(self.here).as_posix(): path.read_text() for path in paths}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


async def test_logs_are_continued_and_begin_anew_where_they_were_rotated(node: Node) -> None:
    node.write("logs/learning-A.jsonl", "one\ntwo, and a bit more\n")
    await node.update()
    node.write("logs/learning-A.jsonl", "three\n", "a")
    await node.update()
    assert node.found() == {"logs/learning-A.jsonl": "one\ntwo, and a bit more\nthree\n"}
    node.write("logs/learning-A.jsonl", "four\n", "a")
    (node.folder / "logs/learning-A.jsonl").rename(node.folder / "logs/learning-A.jsonl.1")
    node.write("logs/learning-A.jsonl", "five\n")
    await node.update()
    assert node.found() == {"logs/learning-A.jsonl": "one\ntwo, and a bit more\nthree\nfour\nfive\n"}
    node.write("logs/learning-A.jsonl", "")
    await node.update()
    node.write("logs/learning-A.jsonl", "six\n")
    await node.update()
    assert node.found()["logs/learning-A.jsonl"].endswith("five\nsix\n")
    node.agent.close()


async def test_a_checkpoint_appears_whole_and_goes_with_its_original(node: Node) -> None:
    node.write("A/.partial-checkpoint-000000000001/state.json", "w")
    node.write("A/version", "1")
    node.write("run.json", "{}")
    node.write("services.key", "secret")
    await node.update()
    assert node.found() == {"A/version": "1"}
    (node.folder / "A/.partial-checkpoint-000000000001").rename(node.folder / "A/checkpoint-000000000001")
    node.write("A/checkpoint-000000000001/weights", "a state of more than one part")
    node.write("A/version", "2")
    await node.update()
    found = {
        "A/version": "2",
        "A/checkpoint-000000000001/state.json": "w",
        "A/checkpoint-000000000001/weights": "a state of more than one part",
    }
    assert node.found() == found
    shutil.rmtree(node.folder / "A/checkpoint-000000000001")
    node.write("A/checkpoint-000000000002/state.json", "w2")
    await node.update()
    assert node.found() == {"A/version": "2", "A/checkpoint-000000000002/state.json": "w2"}
    assert not [*(node.here / "A").glob(".partial-*")]
    node.agent.close()


async def test_what_was_sent_to_a_node_is_neither_copied_back_nor_removed_by_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node.here / "A/checkpoint-000000000001").mkdir(parents=True)
    (node.here / "A/checkpoint-000000000001/state.json").write_text("here")
    (node.here / "A/checkpoint-000000000000").mkdir()
    (node.here / "A/checkpoint-000000000000/state.json").write_text("older")
    node.mirror = Mirror(node.here, "A", ["A/checkpoint-000000000001/state.json", "run.json"])
    node.write("A/checkpoint-000000000001/state.json", "there")
    await node.update()
    assert node.found() == {
        "A/checkpoint-000000000001/state.json": "here",
        "A/checkpoint-000000000000/state.json": "older",
    }
    shutil.rmtree(node.folder / "A/checkpoint-000000000001")
    await node.update()
    assert (node.here / "A/checkpoint-000000000001").exists(), "nothing newer is there"
    node.write("A/checkpoint-000000000002/state.json", "newer")
    await node.update()
    assert node.found() == {
        "A/checkpoint-000000000000/state.json": "older",
        "A/checkpoint-000000000002/state.json": "newer",
    }
    node.agent.close()


async def test_a_checkpoint_that_is_removed_while_it_is_copied_is_not_taken_for_whole(node: Node) -> None:
    node.write("A/checkpoint-000000000001/state.json", "s")
    node.write("A/checkpoint-000000000001/weights", "a weight of more than one part")
    listing = node.agent._listing()

    async def vanishing(name: str, offset: int) -> bytes:
        return node.agent.read(name, offset) if offset < 14 else b""

    await node.mirror.update(listing, vanishing)
    assert node.found() == {}
    await node.update()
    assert len(node.found()) == 2
    node.agent.close()


async def test_names_that_leave_the_folder_are_ignored(node: Node) -> None:
    async def read(_name: str, offset: int) -> bytes:
        return b"" if offset else b"content"

    listing = {"logs/../../escaped": (7, 1), "/logs/x": (7, 1), "A/../B/version": (7, 1), "logs/ok": (7, 1)}
    await node.mirror.update(listing, read)
    assert node.found() == {"logs/ok": "content"}
    node.agent.close()


async def test_a_full_disk_leaves_no_part_of_a_checkpoint(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.write("A/checkpoint-000000000001/state.json", "w")

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(mirror, "write_atomically", full)
        with pytest.raises(OSError, match="No space"):
            await node.update()
    assert node.found() == {}
    await node.update()
    assert node.found() == {"A/checkpoint-000000000001/state.json": "w"}
    node.agent.close()
