"""Settings of coordination: how fresh data must be, ghost self-play and the ends of lessons, in ML-Agents' words."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from sparring.pipeline import plugins
from sparring.pipeline.networks.settings import StrictSettings, typed_section

Mode = Literal["overlap", "lockstep"]
Measure = Literal["reward", "progress", "rating"]


class CoordinationSettings(StrictSettings):
    """How old the data of an update may be.

    Attributes:
        mode: `overlap` collects one buffer while the last one trains; `lockstep` takes turns and
            is deterministic; None follows `threaded` of the behaviors, else `overlap`.
        max_policy_lag: a segment whose newest row is more policy versions old than this is
            dropped and counted, unless the learner would wait for lack of data.
        step_budget: most steps in flight of a behavior whose trainer learns from steps of any age (sac), in overlap;
            None for two updates, each with at least 16 steps of each agent.
    """

    mode: Mode | None = None
    max_policy_lag: int = Field(default=3, ge=1)
    step_budget: int | None = Field(default=None, ge=1)


class OpponentSettings(StrictSettings):
    """An external opponent.

    Attributes:
        checkpoint: folder of a checkpoint of any run, or one with several: each is an opponent then; or
        scripted: name of a script with which the simulators play the behavior id themselves.
        weight: relative frequency, those of a folder together; all snapshots of the run together have 1.
    """

    checkpoint: str | None = None
    scripted: str | None = Field(default=None, min_length=1)
    weight: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.checkpoint is None) == (self.scripted is None):
            raise ValueError("got both or none of checkpoint and scripted; expected one of them; give one")
        return self


class Candidate(NamedTuple):
    """A snapshot that may be the next opponent.

    Attributes:
        version: of its weights; a newer one has a higher version.
        rate: win rate of the learning team against it, 0 to 1, where a draw counts half; 0.5 without a match.
        matches: number of matches with it.
    """

    version: int
    rate: float
    matches: int


class OpponentSampling(StrictSettings):
    """How a snapshot is sampled as an opponent; a plug-in is a subclass.

    Attributes:
        type: name of the plug-in.
    """

    type: str

    def weights(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        """Returns how often each candidate is to be sampled, relative to the others.

        Args:
            candidates: snapshots in the window, oldest first; at least one.
        """
        raise NotImplementedError


class UniformSampling(OpponentSampling):
    """Each snapshot is as likely as the others (ML-Agents)."""

    def weights(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        return [1.0] * len(candidates)


class PrioritizedSampling(OpponentSampling):
    """Samples with (1 - rate)^power: the harder the more often.

    Prioritized fictitious self-play (Vinyals et al. 2019, "Grandmaster level in StarCraft II using multi-agent
    reinforcement learning", Methods), where `power` is 2.

    Attributes:
        power: 0 is uniform; the higher, the more does the hardest prevail.
    """

    power: float = Field(default=2.0, ge=0)

    def weights(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        return [(1 - one.rate) ** self.power for one in candidates]


class SelfPlaySettings(StrictSettings):
    """Ghost self-play: one team learns, the others play past policies.

    Attributes:
        save_steps: learner steps between snapshots.
        team_change: learner steps until the next team learns; 5 x `save_steps` where unsaid.
        swap_steps: ghost steps between changes of opponent.
        window: how many snapshots are kept.
        play_against_latest_model_ratio: probability of the latest policy as opponent.
        initial_elo: rating at the start.
        elo_k: how far one match moves an Elo rating at most.
        opponent_sampling: how a snapshot is sampled: name of a plug-in, or its section with the name as `type`.
        opponents: others than snapshots of the run.
        keep_all_snapshots: those that leave the window stay on disk.
    """

    save_steps: int = Field(default=20_000, ge=1)
    team_change: int = Field(default=100_000, ge=1)
    swap_steps: int = Field(default=2_000, ge=1)
    window: int = Field(default=10, ge=1)
    play_against_latest_model_ratio: float = Field(default=0.5, ge=0, le=1)
    initial_elo: float = 1200.0
    elo_k: float = Field(default=16.0, gt=0)
    opponent_sampling: SerializeAsAny[OpponentSampling] = UniformSampling(type="uniform")
    opponents: tuple[OpponentSettings, ...] = Field(default=(), strict=False)  # JSON knows lists only
    keep_all_snapshots: bool = False

    @property
    def scripts(self) -> frozenset[str]:
        """Returns the scripts that every simulator must be able to play."""
        return frozenset(one.scripted for one in self.opponents if one.scripted is not None)

    @field_validator("opponent_sampling", mode="before")
    @classmethod
    def _of_plugin(cls, value: Any, info: ValidationInfo) -> Any:
        return typed_section(plugins.OPPONENTS, value, info)

    @model_validator(mode="before")
    @classmethod
    def _team_change_follows(cls, data: Any) -> Any:
        save_steps = data.get("save_steps") if isinstance(data, dict) else None
        if type(save_steps) is int and save_steps > 0:
            return {"team_change": 5 * save_steps, **data}
        return data


class CompletionCriteria(StrictSettings):
    """Decides when a lesson is completed.

    Attributes:
        measure: `reward`: mean return of the last `min_lesson_length` episodes, or of up to 100 if that is 0;
            `progress`: completed share of `max_steps`; `rating`: Elo of the learner under self-play, with more than two
            teams its mu. ML-Agents' name `Elo` is accepted too.
        behavior: name of the measured behavior.
        signal_smoothing: weight a mean return by 0.75 and the former measure by 0.25.
        min_lesson_length: least episodes in the lesson.
        threshold: the lesson is completed above it.
        require_reset: all agents begin new episodes with the next lesson.
    """

    measure: Measure = "reward"
    behavior: str
    signal_smoothing: bool = True
    min_lesson_length: int = Field(default=0, ge=0)
    threshold: float = 0.0
    require_reset: bool = False

    @field_validator("measure", mode="before")
    @classmethod
    def _ml_agents_name(cls, measure: object) -> object:
        return "rating" if measure in ("Elo", "elo", "ELO") else measure

    @model_validator(mode="after")
    def _share(self) -> Self:
        if self.measure == "progress" and not 0 <= self.threshold <= 1:
            raise ValueError(
                f"got threshold {self.threshold:g} for progress; expected 0 to 1; write the share of max_steps"
            )
        return self
