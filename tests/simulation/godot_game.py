#!/usr/bin/env python3
"""A Godot game with the Godot RL Agents plugin, as far as a trainer can tell: written from the protocol's description.

It dials in to 127.0.0.1 at --port, is asked who it is, and plays the goal game with --agents agents of the --kinds, in
turn. What a kind sees and does is in `KINDS`. An agent that is done begins its next episode at once: the observation
beside its `done` is that episode's first.

    --generation=1      the spaces once for all agents, and no policy names (one kind only)
    --late              begin the next episode one frame later: the observation beside `done` is the old episode's last
    --old_sizes         sizes of images as [width, height, channels]
    --fault=F --at=N    do F in place of the answer number N; 0 is env_info, 1 the first reset
    --dribble           send byte by byte
    --started=FILE      write the command line there
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
    # As the published games have them: BallChase, and the two policies of MultiAgentSimple.
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
    """One walk to the goal."""

    def __init__(self, kind: str, source: random.Random, late: bool) -> None:
        self.kind = kind
        self.seen, self.done = KINDS[kind]
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
            size: int = self.seen["obs"]["size"][0]
            return {"obs": [self.goal, *self.positions, *[0.0] * (size - 1 - len(self.positions))]}
        if self.kind == "hopper":
            return {"obs": [self.goal, self.age / 100], "lane": self.age % LANES}
        return {"empty": [], "camera_2d": picture(self.goal, self.age)}

    def called(self, method: str) -> Any:
        """What a method returns; None where it returns nothing, or there is none."""
        if method == "get_obs_space":
            return self.seen
        if method == "face_left":
            self._goals = [-1]
        return None

    def act(self, action: dict[str, Any]) -> tuple[float, bool]:
        """Moves; the reward, and whether the episode has ended."""
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
    """Row by row, pixel by pixel: red for -1 and green for +1, and blue counts up with the pixels."""
    colour = [255, 0] if goal < 0 else [0, 255]
    pixels = [[*colour, (row * WIDTH + at + age) % 256] for row in range(HEIGHT) for at in range(WIDTH)]
    return bytes(byte for pixel in pixels for byte in pixel).hex()


class Game:
    """The conversation."""

    def __init__(self, options: dict[str, str]) -> None:
        self.options = options
        kinds = options.get("kinds", "walker").split(",")
        source = random.Random(int(options.get("env_seed", "1")))
        count = int(options.get("agents", "4"))
        late = "late" in options
        self.agents = [Agent(kinds[at % len(kinds)], source, late) for at in range(count)]
        self.answers = 0
        self.actions = 0

    def dial(self) -> None:
        self.line = socket.create_connection(("127.0.0.1", int(self.options.get("port", "11008"))))
        self.line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def hear(self) -> dict[str, Any] | None:
        """The next message; None at the end of the line."""
        head = self.line.recv(4, socket.MSG_WAITALL)
        if len(head) < 4:
            return None
        message: dict[str, Any] = json.loads(self.line.recv(struct.unpack("<I", head)[0], socket.MSG_WAITALL))
        return message

    def say(self, message: dict[str, Any]) -> None:
        fault = self.options.get("fault") if self.answers == int(self.options.get("at", "-1")) else None
        self.answers += 1
        if fault is not None:
            message = self.hurt(fault, message)
        self.write(json.dumps(message, separators=(",", ":")).encode())

    def write(self, text: bytes) -> None:
        data = struct.pack("<I", len(text)) + text
        if "dribble" in self.options:
            for at in range(len(data)):
                self.line.send(data[at : at + 1])
        else:
            self.line.sendall(data)

    def hurt(self, fault: str, message: dict[str, Any]) -> dict[str, Any]:
        """Does what a game should not; some faults are in the message, the others never return."""
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
        threading.Event().wait()  # until somebody ends this process
        return {}

    def play(self) -> None:
        while (message := self.hear()) is not None and message["type"] != "close":
            if message["type"] == "handshake":
                assert (message["major_version"], message["minor_version"]) == ("0", "7")
            elif message["type"] == "env_info":
                self.say(self.introduction())
            elif message["type"] == "reset":
                for agent in self.agents:
                    agent.begin()
                self.say({"type": "reset", "obs": [agent.observe() for agent in self.agents]})
            elif message["type"] == "action":
                self.say(self.frame(message["action"]))
            elif message["type"] == "call":
                self.say({"type": "call", "returns": [agent.called(message["method"]) for agent in self.agents]})
            else:
                raise AssertionError(message)
        sys.stdout.write(f"heard {self.actions} actions and {message}\n")

    def frame(self, actions: list[dict[str, Any]]) -> dict[str, Any]:
        self.actions += 1
        came = [agent.act(action) for agent, action in zip(self.agents, actions, strict=True)]
        return {
            "type": "step",
            "obs": [agent.observe() for agent in self.agents],
            "reward": [reward for reward, _ in came],
            "done": [done for _, done in came],
            "info": [{}] * len(came),
        }

    def introduction(self) -> dict[str, Any]:
        seen = json.loads(json.dumps([agent.seen for agent in self.agents]))
        if "old_sizes" in self.options:
            for space in seen:
                space["camera_2d"]["size"].reverse()
        info: dict[str, Any] = {"type": "env_info", "observation_space": seen}
        info["action_space"] = [agent.done for agent in self.agents]
        info["n_agents"] = len(self.agents)
        if self.options.get("generation") == "1":
            return info | {"observation_space": seen[0], "action_space": self.agents[0].done}
        return info | {"agent_policy_names": [agent.kind for agent in self.agents]}


def wrong(fault: str, message: dict[str, Any]) -> dict[str, Any]:
    """The message with one thing wrong: `key` is missing, or `key=JSON` instead, or `key.2=JSON` for agent 2."""
    key, given, text = fault.partition("=")
    name, _, agent = key.partition(".")
    if not given:
        return {one: value for one, value in message.items() if one != name}
    value = json.loads(text)
    if agent:
        values = list(message[name])
        values[int(agent)] = value
        value = values
    return message | {name: value}


def main() -> None:
    options = {}
    for word in sys.argv[1:]:
        key, _, value = word.lstrip("-").partition("=")
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
    game.dial()
    game.play()


if __name__ == "__main__":
    main()
