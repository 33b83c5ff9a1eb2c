#!/usr/bin/env python3
"""A stand-in for a Godot game with the Godot RL Agents plugin, written from the description of the protocol.

It connects to 127.0.0.1 at --port, introduces itself on request, and plays the goal game with --agents agents of the
--kinds in turn. `KINDS` holds observations and actions of each kind. An agent that is done begins its next episode at
once: the observation beside its `done` is that episode's first.

    --generation=1      sends the spaces once for all agents and no policy names (one kind only)
    --late              begins the next episode one frame later: the observation beside `done` is the old episode's last
    --old_sizes         sends sizes of images as [width, height, channels]
    --fault=F --at=N    does F in place of answer number N; 0 is env_info, 1 the first reset
    --dribble           sends byte by byte
    --started=FILE      writes the command line to FILE
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import sys
import threading
from typing import Any

Spaces = dict[str, dict[str, Any]]

STEP_SIZE = 0.2
WIDTH, HEIGHT, LANES = 6, 4, 3
RAYS, RUNNER, CHASER = 21, 48, 12
KINDS: dict[str, tuple[Spaces, Spaces]] = {
    "walker": ({"obs": {"size": [1], "space": "box"}}, {"move": {"size": 1, "action_type": "continuous"}}),
    "hopper": (
        {"obs": {"size": [2], "space": "box"}, "lane": {"size": LANES, "space": "discrete"}},
        {"hop": {"size": 2, "action_type": "discrete"}},
    ),
    "seer": (
        {"empty": {"size": [0], "space": "box"}, "camera_2d": {"size": [3, HEIGHT, WIDTH], "space": "box"}},
        {
            "aim": {"size": 2, "action_type": "discrete"},
            "move": {"size": 2, "action_type": "continuous"},
            "turn": {"size": 1, "action_type": "continuous"},
            "jump": {"size": 2, "action_type": "discrete"},
        },
    ),
    # The spaces of published games: BallChase, and the two policies of MultiAgentSimple.
    "ball": (
        {"obs": {"size": [RAYS], "space": "box"}},
        {"move": {"size": 2, "action_type": "continuous"}},
    ),
    "runner": (
        {"obs": {"size": [RUNNER], "space": "box"}},
        {"movement": {"size": 2, "action_type": "continuous"}},
    ),
    "chaser": (
        {"obs": {"size": [CHASER], "space": "box"}},
        {"movement": {"size": 1, "action_type": "continuous"}},
    ),
}
BYTES = {
    "no_json": b"GET / HTTP/1.1",
    "a_list": b"[1,2]",
    "a_type": b'{"type":"surprise"}',
    "deep": b"[" * 100_000,
}


class Agent:
    """An agent that walks to its goal."""

    def __init__(self, kind: str, source: random.Random, late: bool) -> None:
        self.kind = kind
        self.space, self.done = KINDS[kind]
        self._source = source
        self._late = late
        self._over = False
        self._goals = [-1, 1]
        self.begin()

    def begin(self) -> None:
        places = sum(head["size"] if head["action_type"] == "continuous" else 1 for head in self.done.values())
        self.positions = [0.0] * places
        self.goal = self._source.choice(self._goals)
        self.age = 0
        self._over = False

    def observe(self) -> dict[str, Any]:
        if self.kind == "walker":
            return {"obs": [self.goal]}
        if self.kind in ("ball", "runner", "chaser"):
            size: int = self.space["obs"]["size"][0]
            return {"obs": [self.goal, *self.positions, *[0.0] * (size - 1 - len(self.positions))]}
        if self.kind == "hopper":
            return {"obs": [self.goal, self.age / 100], "lane": self.age % LANES}
        return {"empty": [], "camera_2d": picture(self.goal, self.age)}

    def called(self, method: str) -> Any:
        """Returns the result of a method, or None if it has none or does not exist."""
        if method == "get_obs_space":
            return self.space
        if method == "face_left":
            self._goals = [-1]
        return None

    def act(self, action: dict[str, Any]) -> tuple[float, bool]:
        """Moves and returns the reward and whether the episode has ended."""
        if self._over:
            self.begin()
        moves: list[float] = []
        for name, head in self.done.items():
            chosen = action[name]
            if head["action_type"] == "discrete":
                assert isinstance(chosen, int), chosen
                assert 0 <= chosen < head["size"], chosen
                moves.append(STEP_SIZE if chosen == 1 else -STEP_SIZE)
            else:
                assert len(chosen) == head["size"], chosen
                moves += [min(max(move, -STEP_SIZE), STEP_SIZE) for move in chosen]
        self.positions = [min(max(at + by, -1), 1) for at, by in zip(self.positions, moves, strict=True)]
        self.age += 1
        if min(map(abs, self.positions)) < 1:
            return -0.01, False
        reward = 1.06 * self.goal * sum(self.positions) / len(self.positions)
        self._over = self._late
        if not self._late:
            self.begin()
        return reward, True


def picture(goal: int, age: int) -> str:
    """Returns pixels in rows: red for -1, green for +1, and blue counts the pixels."""
    colour = [255, 0] if goal < 0 else [0, 255]
    pixels = [[*colour, (row * WIDTH + at + age) % 256] for row in range(HEIGHT) for at in range(WIDTH)]
    return bytes(byte for pixel in pixels for byte in pixel).hex()


class Game:
    """The conversation with the trainer."""

    def __init__(self, options: dict[str, str]) -> None:
        self.options = options
        kinds = options.get("kinds", "walker").split(",")
        source = random.Random(int(options.get("env_seed", "1")))
        count = int(options.get("agents", "4"))
        late = "late" in options
        self.agents = [Agent(kinds[at % len(kinds)], source, late) for at in range(count)]
        self.answers = 0
        self.actions = 0

    def connect(self) -> None:
        self.line = socket.create_connection(("127.0.0.1", int(self.options.get("port", "11008"))))
        self.line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(self) -> dict[str, Any] | None:
        """Returns the next message, or None at the end of the stream."""
        head = self.line.recv(4, socket.MSG_WAITALL)
        if len(head) < 4:
            return None
        message: dict[str, Any] = json.loads(self.line.recv(struct.unpack("<I", head)[0], socket.MSG_WAITALL))
        return message

    def send(self, message: dict[str, Any]) -> None:
        fault = self.options.get("fault") if self.answers == int(self.options.get("at", "-1")) else None
        self.answers += 1
        if fault is not None:
            message = self.inject(fault, message)
        self.write(json.dumps(message, separators=(",", ":")).encode())

    def write(self, text: bytes) -> None:
        data = struct.pack("<I", len(text)) + text
        if "dribble" in self.options:
            for at in range(len(data)):
                self.line.send(data[at : at + 1])
        else:
            self.line.sendall(data)

    def inject(self, fault: str, message: dict[str, Any]) -> dict[str, Any]:
        """Injects a fault; some change the message, others never return."""
        if fault in BYTES:
            self.write(BYTES[fault])
        elif fault == "huge":
            self.line.sendall(struct.pack("<I", 2**31))
        elif fault == "half":
            self.line.sendall(struct.pack("<I", 1000) + b"{")
        elif fault == "crash":
            sys.stderr.write("ERROR: division by zero in player.gd:7\n")
            sys.exit(9)
        elif fault == "hang_up":
            self.line.shutdown(socket.SHUT_RDWR)
        elif fault == "nan":
            self.write(json.dumps(message).replace(": [1", ": [nan").replace(": [-1", ": [-nan").encode())
        elif fault != "stall":
            return wrong(fault, message)
        threading.Event().wait()  # until a test ends this process
        return {}

    def play(self) -> None:
        while (message := self.receive()) is not None and message["type"] != "close":
            if message["type"] == "handshake":
                assert (message["major_version"], message["minor_version"]) == ("0", "7")
            elif message["type"] == "env_info":
                self.send(self.introduction())
            elif message["type"] == "reset":
                for agent in self.agents:
                    agent.begin()
                self.send({"type": "reset", "obs": [agent.observe() for agent in self.agents]})
            elif message["type"] == "action":
                self.send(self.frame(message["action"]))
            elif message["type"] == "call":
                self.send({"type": "call", "returns": [agent.called(message["method"]) for agent in self.agents]})
            else:
                raise AssertionError(message)
        sys.stdout.write(f"received {self.actions} actions and {message}\n")

    def frame(self, actions: list[dict[str, Any]]) -> dict[str, Any]:
        self.actions += 1
        outcomes = [agent.act(action) for agent, action in zip(self.agents, actions, strict=True)]
        return {
            "type": "step",
            "obs": [agent.observe() for agent in self.agents],
            "reward": [reward for reward, _ in outcomes],
            "done": [done for _, done in outcomes],
            "info": [{}] * len(outcomes),
        }

    def introduction(self) -> dict[str, Any]:
        spaces = json.loads(json.dumps([agent.space for agent in self.agents]))
        if "old_sizes" in self.options:
            for space in spaces:
                space["camera_2d"]["size"].reverse()
        info: dict[str, Any] = {"type": "env_info", "observation_space": spaces}
        info["action_space"] = [agent.done for agent in self.agents]
        info["n_agents"] = len(self.agents)
        if self.options.get("generation") == "1":
            return info | {"observation_space": spaces[0], "action_space": self.agents[0].done}
        return info | {"agent_policy_names": [agent.kind for agent in self.agents]}


def wrong(fault: str, message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message without `key`, with `key=JSON` changed, or with `key.2=JSON` changed for agent 2."""
    key, equals, text = fault.partition("=")
    name, _, agent = key.partition(".")
    if not equals:
        return {field: value for field, value in message.items() if field != name}
    value = json.loads(text)
    if agent:
        values = list(message[name])
        values[int(agent)] = value
        value = values
    return message | {name: value}


def main() -> None:
    options = {}
    for argument in sys.argv[1:]:
        key, _, value = argument.lstrip("-").partition("=")
        options[key] = value
    if "started" in options:
        with open(options["started"], "w") as file:  # noqa: PTH123
            json.dump([sys.argv[1:], os.getpid()], file)
    if options.get("fault") == "no_start":
        sys.stderr.write("ERROR: no display\n")
        sys.exit(7)
    if options.get("fault") == "no_call":
        threading.Event().wait()
    game = Game(options)
    game.connect()
    game.play()


if __name__ == "__main__":
    main()
