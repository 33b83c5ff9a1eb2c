"""The actors of a recording: checkpoints, or the simulator itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sparring.pipeline.demonstrations.tape import ByAgent
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import BehaviorSpec, read_spec
from sparring.pipeline.stepping.policies import Policies
from sparring.services.commands.players import actor_of
from sparring.services.supervision.launch import checkpoints_of, load_player


@dataclass(frozen=True)
class _Network:
    network_settings: NetworkSettings


@dataclass
class CheckpointActor:
    """Acts with checkpoints.

    Attributes:
        path: of one checkpoint, or of the folder of a run.
        seed: of the sampling.
        deterministic: take the most likely actions.
    """

    path: Path
    seed: int
    deterministic: bool
    _policies: dict[str, Policies] = field(default_factory=dict, init=False)
    _carried: dict[str, ByAgent] = field(default_factory=dict, init=False)

    def register(self, name: str, spec: BehaviorSpec, scripts: Sequence[str], *, recorded: bool) -> None:
        """Loads the checkpoint of a behavior."""
        del scripts, recorded
        one = (self.path / "state.json").exists()
        path = self.path if one else checkpoints_of(self.path, name)[-1]
        checkpoint = load_player(path)
        if checkpoint.behavior != name:
            raise SettingsError(
                f"got {path}, a checkpoint of {checkpoint.behavior}, and a simulator with {name}; expected one for "
                "each behavior; name the folder of a run that has trained all of them"
            )
        if (trained := read_spec(checkpoint.description["spec"])) != spec:
            raise SettingsError(
                f"got {path}, trained with {trained}; expected {spec}, as {name} has here; "
                "record with the simulator that it was trained in"
            )
        weights = actor_of(checkpoint)
        network = NetworkSettings.model_validate_json(weights.network)
        network = network.model_copy(update={"deterministic": self.deterministic})
        stream = np.random.SeedSequence([self.seed, len(self._policies)]).generate_state(1)[0]
        policies = self._policies[name] = Policies({name: _Network(network)}, int(stream))
        policies.learn(weights)
        policies.build(name, spec)

    def act(self, name: str, report: BehaviorReport) -> BehaviorActions | None:
        """Chooses actions for all that decide, in one forward pass."""
        policy = self._policies[name].current[name]
        table = self._carried.setdefault(report.behavior, ByAgent(np.zeros((0, policy.carried), np.float32)))
        if report.ends is not None:
            table.remove(report.ends.agents)
        decisions = report.decisions
        if decisions is None or not len(decisions.agents):
            return None
        carried = table.find(decisions.agents)[0] if policy.carried else None
        chosen = policy.act(decisions.observations, decisions.masks, carried)
        if carried is not None:
            table.put(decisions.agents, carried)
        return BehaviorActions(
            behavior=report.behavior, agents=decisions.agents, continuous=chosen.executed, discrete=chosen.discrete
        )


@dataclass
class SimulatorActor:
    """Leaves the choice to the simulator: to one of its scripts, or to a person. The actions sent are placeholders.

    Attributes:
        script: its name; "" for none.
    """

    script: str
    _numbers: dict[str, int] = field(default_factory=dict, init=False)
    _specs: dict[str, BehaviorSpec] = field(default_factory=dict, init=False)

    def register(self, name: str, spec: BehaviorSpec, scripts: Sequence[str], *, recorded: bool) -> None:
        """Looks the script up; behaviors that are not recorded and do not have it get zeros."""
        self._specs[name] = spec
        if self.script in scripts:
            self._numbers[name] = scripts.index(self.script) + 1
        elif self.script and recorded:
            raise SettingsError(
                f"got --script {self.script} for {name}; expected one of its scripts, {list(scripts) or 'none'}; "
                "correct the name, or record with --policy or --manual"
            )

    def act(self, name: str, report: BehaviorReport) -> BehaviorActions | None:
        """Returns zeros for all that decide, and the number of the script."""
        if report.decisions is None or not len(report.decisions.agents):
            return None
        agents, actions = report.decisions.agents, self._specs[name].actions
        return BehaviorActions(
            behavior=report.behavior,
            agents=agents,
            continuous=np.zeros((len(agents), actions.continuous), np.float32),
            discrete=np.zeros((len(agents), len(actions.discrete)), np.int32),
            scripts=np.full(len(agents), self._numbers[name], np.int32) if name in self._numbers else None,
        )


RecordingActor = CheckpointActor | SimulatorActor
"""Answers the reports of the simulator: `register` prepares for a behavior, `act` returns actions for its decisions."""
