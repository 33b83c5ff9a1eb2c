"""A Unity player of the comparison, for both trainers: `python -m beside.player push --record FILE --mlagents-port N`.

It runs in ML-Agents' own environment and speaks through that package's protobufs, so that no word of the protocol is
this project's. Each agent gets a new id with each episode, as in Unity, and ended and deciding agents share a message.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

import grpc
import numpy as np
from mlagents_envs.communicator_objects.agent_info_pb2 import AgentInfoProto
from mlagents_envs.communicator_objects.brain_parameters_pb2 import ActionSpecProto, BrainParametersProto
from mlagents_envs.communicator_objects.command_pb2 import QUIT, RESET
from mlagents_envs.communicator_objects.observation_pb2 import ObservationProto
from mlagents_envs.communicator_objects.unity_message_pb2 import UnityMessageProto
from mlagents_envs.communicator_objects.unity_to_external_pb2_grpc import UnityToExternalProtoStub
from numpy.typing import NDArray

from beside.games import ARENAS, GAMES, Floats, Game, Turn

VERSION: Final = "1.5.0"
CAPABILITIES: Final = (
    "baseRLCapabilities",
    "concatenatedPngObservations",
    "compressedChannelMapping",
    "hybridActions",
    "variableLengthObservation",
    "multiAgentGroups",
)
OK: Final = 200
CONNECT_S: Final = 60.0
EVERY: Final = 1_000
"""Steps between two lines of the record with the progress of the game."""


class Record:
    """The game's own record, one JSON line per ended episode and one every `EVERY` steps.

    A step is a decision of the first behavior, which is what a trainer counts of the team that learns.

    Args:
        file: gets the lines.
        keys: of the behaviors.
        arenas: of the game.
    """

    def __init__(self, file: IO[str], keys: tuple[str, ...], arenas: int) -> None:
        self._file = file
        self._steps = 0
        self._written = 0
        self._began: float | None = None
        self._returns = {key: np.zeros(arenas) for key in keys}
        self._lengths = np.zeros(arenas, np.int64)

    def turn(self, turns: Mapping[str, Turn]) -> None:
        """Counts one step of all arenas; the clock starts with the first."""
        if self._began is None:
            self._began = time.monotonic()
        self._lengths += 1
        self._steps += len(self._lengths)
        for key, turn in turns.items():
            self._returns[key] += turn.rewards
        ended = next(iter(turns.values())).ended.nonzero()[0]
        for arena in ended.tolist():
            returns = {key: float(values[arena]) for key, values in self._returns.items()}
            self._line(returns=returns, length=int(self._lengths[arena]))
        if ended.size:
            self._lengths[ended] = 0
            for values in self._returns.values():
                values[ended] = 0
        if self._steps - self._written >= EVERY:
            self._written = self._steps
            self._line()

    def _line(self, **more: Any) -> None:
        assert self._began is not None
        seconds = round(time.monotonic() - self._began, 4)
        self._file.write(json.dumps({"step": self._steps, "seconds": seconds, **more}) + "\n")


class Player:
    """One game in the order of Unity's communicator.

    Args:
        game: of the player.
        record: gets what happens.
    """

    def __init__(self, game: Game, record: Record, arenas: int) -> None:
        self._game = game
        self._record = record
        self._announced = False
        self._ids = {key: np.arange(arenas) + number * arenas for number, key in enumerate(game.keys)}
        self._next = arenas * len(game.keys)

    def play(self, stub: Any) -> None:
        """Plays until the trainer ends it."""
        hello = UnityMessageProto()
        hello.header.status = OK
        started = hello.unity_output.rl_initialization_output
        started.name, started.communication_version, started.package_version = "beside", VERSION, "3.0.0"
        for capability in CAPABILITIES:
            setattr(started.capabilities, capability, True)
        stub.Exchange(hello, timeout=CONNECT_S, wait_for_ready=True)
        empty = UnityMessageProto()
        empty.header.status = OK
        empty.unity_output.SetInParent()
        answer = stub.Exchange(empty)
        while answer.header.status == OK and answer.unity_input.rl_input.command != QUIT:
            answer = stub.Exchange(self._message(answer.unity_input.rl_input))

    def _message(self, given: Any) -> Any:
        message = UnityMessageProto()
        message.header.status = OK
        entries = message.unity_output.rl_output.agentInfos
        if given.command == RESET:
            for key, observations in self._game.reset().items():
                self._renew(key, np.ones(len(observations), np.bool_))
                zeros, no = np.zeros(len(observations), np.float32), np.zeros(len(observations), np.bool_)
                self._add(entries[key].value, key, Turn(observations, zeros, no, no, observations))
            self._announce(message)
            return message
        actions = {key: _actions(given.agent_actions[key].value, self._game.actions) for key in self._game.keys}
        turns = self._game.step(actions)
        self._record.turn(turns)
        for key, turn in turns.items():
            self._add(entries[key].value, key, turn)
        return message

    def _announce(self, message: Any) -> None:
        if self._announced:
            return
        self._announced = True
        spec = ActionSpecProto(num_continuous_actions=self._game.actions)
        known = [BrainParametersProto(brain_name=key, is_training=True, action_spec=spec) for key in self._game.keys]
        message.unity_output.rl_initialization_output.brain_parameters.extend(known)

    def _add(self, infos: Any, key: str, turn: Turn) -> None:
        """Lists agents that ended, then all that decide."""
        rewards, ids = turn.rewards.tolist(), self._ids[key].tolist()
        ended = turn.ended.nonzero()[0].tolist()
        for arena in ended:
            infos.add(
                id=ids[arena],
                reward=rewards[arena],
                done=True,
                max_step_reached=bool(turn.interrupted[arena]),
                observations=[_observation(turn.last[arena])],
            )
            rewards[arena] = 0.0
        if ended:
            self._renew(key, turn.ended)
            ids = self._ids[key].tolist()
        for arena, seen in enumerate(turn.observations):
            infos.append(AgentInfoProto(id=ids[arena], reward=rewards[arena], observations=[_observation(seen)]))

    def _renew(self, key: str, arenas: NDArray[np.bool_]) -> None:
        count = int(arenas.sum())
        self._ids[key][arenas] = self._next + np.arange(count)
        self._next += count


def _observation(values: Floats) -> Any:
    data = ObservationProto.FloatData(data=values.tolist())
    return ObservationProto(shape=values.shape, float_data=data, dimension_properties=[1], name="state")


def _actions(values: Any, size: int) -> Floats:
    """Returns the actions: [arenas, size]."""
    rows = [value.continuous_actions for value in values]
    return np.array(rows, np.float32).reshape(len(rows), size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("game", choices=GAMES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, required=True, help="gets JSON lines")
    parser.add_argument("--mlagents-port", type=int, required=True)
    parser.add_argument("--arenas", type=int, default=0, help="side by side; 0 for those of the game")
    args, _ = parser.parse_known_args()
    arenas = args.arenas or ARENAS[args.game]
    game = GAMES[args.game](arenas, args.seed)
    address = f"127.0.0.1:{args.mlagents_port}"
    with args.record.open("w", buffering=1) as file, grpc.insecure_channel(address) as channel:
        record = Record(file, game.keys, arenas)
        try:
            Player(game, record, arenas).play(UnityToExternalProtoStub(channel))
        except grpc.RpcError as lost:
            print(f"the trainer has gone: {lost}")


if __name__ == "__main__":
    main()
