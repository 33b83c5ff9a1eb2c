"""Loads trained policies, from checkpoints and ONNX files, and acts with them as the caller's environment speaks."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike

from sparring.pipeline.bridges.actions import Actions, forbidden_choices
from sparring.pipeline.bridges.explain import not_finite, shown
from sparring.pipeline.bridges.observations import Observations
from sparring.pipeline.bridges.spaces import numbers
from sparring.pipeline.errors import SettingsError, install_command
from sparring.pipeline.specs import Array, BehaviorSpec, Flags, Floats, read_spec
from sparring.services.api.arguments import checked
from sparring.services.commands.runs import find

Value = Any
"""Observations, masks or actions in the form of the caller's environment."""

ONNX_KEY: Final = "sparring"
"""Name of the metadata of an exported model that `load` reads."""


class Chosen(NamedTuple):
    """Holds actions that belong to no environment.

    Attributes:
        continuous: [n, continuous] from -1 to 1.
        discrete: [n, branches] index of the choice in each.
    """

    continuous: Array
    discrete: Array


class Acted(NamedTuple):
    """Holds what a policy has chosen.

    Attributes:
        actions: of the environment given to `load`; `Chosen` without one.
        memory: for the next decision of the same agents; None for a policy that remembers nothing.
    """

    actions: Value
    memory: Floats | None


class Network(Protocol):
    """A Network evaluates a policy.

    Attributes:
        behavior: name of the behavior.
        spec: observations and actions of the behavior.
        carried: numbers that an agent carries from one decision to the next.
    """

    behavior: str
    spec: BehaviorSpec
    carried: int

    def choose(
        self, observations: Sequence[Array], forbidden: Flags | None, deterministic: bool, memory: Floats
    ) -> tuple[Chosen, Floats]:
        """Returns actions and the memory [n, carried] after them."""


@dataclass(frozen=True, slots=True)
class Form:
    """Converts between the values of an environment and columns.

    Attributes:
        observations: reads its observation space.
        actions: writes its action space.
        batched: its values hold those of several agents.
    """

    observations: Observations
    actions: Actions
    batched: bool

    @property
    def spec(self) -> BehaviorSpec:
        """Returns the spec that the bridge gives such an environment."""
        return BehaviorSpec(observations=self.observations.specs, actions=self.actions.spec)


class Policy:
    """A Policy acts for agents of one behavior.

    Attributes:
        behavior: name of the behavior.
        spec: names, shapes and kinds of its observations, in their order, and its actions.

    Args:
        network: evaluates it.
        form: of the caller's environment; None for columns.
        agents: names of the agents of a PettingZoo environment.
    """

    def __init__(self, network: Network, form: Form | None, agents: Sequence[str] = ()) -> None:
        self.behavior, self.spec = network.behavior, network.spec
        self._network = network
        self._form = form
        self._agents = frozenset(agents)

    def act(
        self,
        observations: Value,
        masks: Value = None,
        *,
        deterministic: bool = False,
        memory: Floats | None = None,
    ) -> Acted:
        """Chooses actions.

        With an environment, observations and actions are its own: of one agent, of all in a vector environment, or by
        the names of agents in one of PettingZoo. Without one, observations are arrays [n, *shape] (or [*shape], for one
        agent): one array, a sequence in the order of the spec, or a mapping by name.

        Args:
            observations: of one agent or several.
            masks: as in Gymnasium and PettingZoo: 1 for each choice that is allowed, of all branches side by side, for
                each agent; None allows all. A PettingZoo observation with `action_mask` needs none.
            deterministic: the most likely actions.
            memory: of the same agents after their last decision; None for zeros, which begin an episode.

        Raises:
            SettingsError: the observations, masks or memory are not those of the agents.
            SpecError: an observation or mask has another form than its space.
            NotFinite: an observation is NaN or infinite.
        """
        if not isinstance(deterministic, (bool, np.bool_)):
            raise self._wrong(f"{deterministic!r:.100} as deterministic", "True or False")
        if self._agents and isinstance(observations, Mapping) and observations.keys() <= self._agents:
            return self._act_by_name(observations, masks, deterministic, memory)
        if self._form is None:
            return self._act_on_columns(observations, masks, deterministic, memory)
        if isinstance(observations, Mapping) and observations.keys() == {"observation", "action_mask"}:
            observations, masks = observations["observation"], observations["action_mask"]
        batched = self._form.batched
        columns = (
            self._form.observations.batch(observations) if batched else self._form.observations.rows([observations])
        )
        given = [masks] if not batched else [None] * len(columns[0]) if masks is None else masks
        chosen, after = self._choose(columns, given, deterministic, memory)
        actions = self._form.actions.batch(*chosen) if batched else self._form.actions.rows(*chosen)[0]
        return Acted(actions, after)

    def _act_by_name(
        self, observations: Mapping[str, Value], masks: Value, deterministic: bool, memory: Floats | None
    ) -> Acted:
        assert self._form is not None
        if masks is not None and not isinstance(masks, Mapping):
            raise self._wrong(f"masks {masks!r:.100}", "those of agents by their names")
        seen, allowed = [], []
        for name, one in observations.items():
            has_mask = isinstance(one, Mapping) and one.keys() == {"observation", "action_mask"}
            seen.append(one["observation"] if has_mask else one)
            allowed.append(one["action_mask"] if has_mask else None if masks is None else masks.get(name))
        chosen, after = self._choose(self._form.observations.rows(seen), allowed, deterministic, memory)
        return Acted(dict(zip(observations, self._form.actions.rows(*chosen), strict=True)), after)

    def _act_on_columns(self, observations: Value, masks: Value, deterministic: bool, memory: Floats | None) -> Acted:
        specs = self.spec.observations
        if isinstance(observations, Mapping):
            if observations.keys() != {one.name for one in specs}:
                raise self._wrong(f"observations {sorted(observations)}")
            observations = [observations[one.name] for one in specs]
        elif not isinstance(observations, (list, tuple)) or len(specs) == 1 != len(observations):
            observations = [observations]
        columns = [self._numbers(one, spec.dtype, spec.name) for one, spec in zip(observations, specs, strict=False)]
        single = bool(columns) and columns[0].shape == specs[0].shape
        columns = [one[None] for one in columns] if single else columns
        if [one.shape[1:] for one in columns] != [one.shape for one in specs] or len({*map(len, columns)}) > 1:
            raise self._wrong(f"arrays of the shapes {[one.shape for one in columns]}")
        for column, spec in zip(columns, specs, strict=True):
            if not np.isfinite(column).all():
                raise not_finite(column, f"observation {spec.name!r}")
        given = [None] * len(columns[0]) if masks is None else [masks] if single else masks
        chosen, after = self._choose(columns, given, deterministic, memory)
        return Acted(Chosen(*(one[0] for one in chosen)) if single else chosen, after)

    def _choose(
        self, columns: Sequence[Array], masks: Sequence[Value], deterministic: bool, memory: Floats | None
    ) -> tuple[Chosen, Floats | None]:
        rows, carried = len(columns[0]), self._network.carried
        if isinstance(masks, str) or not hasattr(masks, "__len__") or getattr(masks, "shape", None) == ():
            raise self._wrong(f"{shown(masks)} as masks", "those of each agent, or None for all")
        if len(masks) != rows:
            raise self._wrong(f"masks of {len(masks)} agents", f"{rows}, or None for all")
        before = np.zeros((rows, carried), np.float32)
        if memory is not None:
            before = self._numbers(memory, np.float32, "memory").copy()
        if before.shape != (rows, carried):
            raise self._wrong(f"a memory of the shape {before.shape}", f"{(rows, carried)}")
        forbidden = forbidden_choices(masks, self.spec.actions)
        chosen, after = self._network.choose(columns, forbidden, deterministic, before)
        return chosen, after if carried else None

    def _numbers(self, values: Value, dtype: DTypeLike, name: str) -> Array:
        try:
            return numbers(values, dtype)
        except (TypeError, ValueError) as error:
            raise self._wrong(f"{shown(values)} as {name} ({error})") from error

    def _wrong(self, got: str, expected: str = "") -> SettingsError:
        listed = ", ".join(f"{one.name} {one.shape} {one.dtype}" for one in self.spec.observations)
        expected = expected or f"[n, *shape] (or [*shape]) of each of {listed}"
        return SettingsError(f"got {got}; expected {expected}; give those of {self.behavior}")


@checked
def load(
    path: str | Path,
    behavior: str | None = None,
    *,
    env: Value = None,
    images: str | None = None,
    seed: int | None = None,
    results_dir: str | Path = "results",
) -> Policy:
    """Loads a trained policy.

    Args:
        path: folder of a run or its id, whose newest checkpoint is loaded; folder of a checkpoint; or an ONNX file that
            `sparring export` or a run has written.
        behavior: of a run with several.
        env: environment of Gymnasium (single or vector) or PettingZoo, whose observations and actions `act` takes and
            returns; encodings and rescalings are those of training. None for columns.
        images: the option `images` of the bridge with which the policy was trained.
        seed: of sampled actions; None for a random one. (A model of ONNX has its own random numbers.)
        results_dir: where a run is found by its id.

    Raises:
        SettingsError: there is no such policy, or the environment has other observations or actions.
        CheckpointError: the checkpoint is damaged.
    """
    folder = Path(path)
    if folder.suffix != ".onnx":
        folder = find(path, Path(results_dir))
    elif not folder.is_file():
        folder = Path(results_dir, folder)
    network: Network = _Model(folder) if folder.suffix == ".onnx" else _Checkpoint(_found(folder, behavior), seed)
    if env is None:
        return Policy(network, None)
    agents = tuple(getattr(env, "possible_agents", ()))
    forms = {one: _form(env, one, images) for one in agents or (None,)}
    form = next((one for one in forms.values() if one.spec == network.spec), None)
    if form is None:
        got = next(iter(forms.values())).spec
        raise SettingsError(
            f"got an environment with {got}; expected {network.spec}; give the environment in which {network.behavior} "
            "was trained, with its wrappers"
        )
    return Policy(network, form, agents)


def _form(env: Value, agent: str | None, images: str | None) -> Form:
    """Returns the form of an environment's values: of one agent, where they have names.

    Raises:
        SettingsError: it is none of Gymnasium or PettingZoo.
        SpecError: a space is not supported.
    """
    if not hasattr(env, "observation_space"):
        raise SettingsError(f"got {env!r:.100} as env; expected an environment of Gymnasium or PettingZoo; correct it")
    batched = hasattr(env, "single_observation_space")
    if agent is not None:
        seen, chosen = env.observation_space(agent), env.action_space(agent)
    elif batched:
        seen, chosen = env.single_observation_space, env.single_action_space
    else:
        seen, chosen = env.observation_space, env.action_space
    inner = getattr(seen, "spaces", {})
    if isinstance(inner, Mapping) and inner.keys() == {"observation", "action_mask"}:
        seen = inner["observation"]
    return Form(Observations(seen, images=images), Actions(chosen), batched)


def _found(folder: Path, behavior: str | None) -> Path:
    """Returns the folder of a checkpoint: this one, or the newest of a run's behavior."""
    if (folder / "state.json").exists():
        return folder
    from sparring.pipeline.learning.checkpoints import newest_first

    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    newest = {
        one.name: path
        for one in inside
        for path in newest_first(one)[::-1]
        if path.name.startswith("c") and (path / "state.json").exists()
    }
    trained, names = list(newest), [name for name in newest if behavior in (None, name)]
    if len(names) != 1:
        got = f"{folder}, which has checkpoints of {', '.join(trained) or 'no behavior'}"
        wanted = "a run or a checkpoint" if not trained else "one of these as behavior"
        raise SettingsError(f"got {got}; expected {wanted}; correct the {'path' if not trained else 'behavior'}")
    return newest[names[0]]


class _Checkpoint:
    """Evaluates the policy of a checkpoint, as `Network` describes."""

    def __init__(self, path: Path, seed: int | None) -> None:
        from sparring.pipeline.export.layout import trained_policy
        from sparring.pipeline.learning import checkpoints

        policy = trained_policy(checkpoints.load(path))
        self.behavior, self.spec = policy.behavior, policy.spec
        self._acting = policy.actor.frozen()
        self.carried = self._acting.carried
        self._source = np.random.default_rng(seed)

    def choose(
        self, observations: Sequence[Array], forbidden: Flags | None, deterministic: bool, memory: Floats
    ) -> tuple[Chosen, Floats]:
        raw, discrete, _ = self._acting.act(observations, forbidden, self._source, deterministic, memory)
        return Chosen(self._acting.executed(raw), discrete), memory


class _Model:
    """Evaluates an exported model, as `Network` describes."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise SettingsError(f"got {path}, which is no file; expected an exported model; correct the path")
        try:
            from onnxruntime import InferenceSession, SessionOptions
        except ImportError as error:
            how = f"install it with `{install_command('onnx')}`"
            raise SettingsError(f"got {path} without onnxruntime; expected this package; {how}") from error
        options = SessionOptions()
        options.intra_op_num_threads = 1  # the models are small
        try:
            self._session = InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            described = json.loads(self._session.get_modelmeta().custom_metadata_map[ONNX_KEY])
            self.behavior, self.spec = described["behavior"], read_spec(described["spec"])
        except KeyError:
            what = "got {path} without the description of a behavior; expected a model that sparring has exported"
            raise SettingsError(f"{what.format(path=path)}; export it anew") from None
        except Exception as error:
            raise SettingsError(f"got {path}, which cannot be loaded ({error}); expected an ONNX model") from error
        shapes = {one.name: one.shape for one in self._session.get_inputs()}
        self.carried = int(shapes["recurrent_in"][2]) if "recurrent_in" in shapes else 0

    def choose(
        self, observations: Sequence[Array], forbidden: Flags | None, deterministic: bool, memory: Floats
    ) -> tuple[Chosen, Floats]:
        actions, rows = self.spec.actions, len(memory)
        given: dict[str, Array] = {}
        for at, (one, spec) in enumerate(zip(observations, self.spec.observations, strict=True)):
            given[f"obs_{at}"] = one.astype(np.float32) / np.float32(255) if spec.dtype == "uint8" else one
        if actions.discrete:
            allowed = np.ones((rows, actions.mask_size), np.float32) if forbidden is None else ~forbidden
            given["action_masks"] = allowed.astype(np.float32)
        if self.carried:
            given["recurrent_in"] = memory[:, None]
        names = [one.name for one in self._session.get_outputs()]
        found = dict(zip(names, self._session.run(names, given), strict=True))
        how = "deterministic_" if deterministic else ""
        continuous = found.get(f"{how}continuous_actions", np.zeros((rows, 0), np.float32))
        discrete = found.get(f"{how}discrete_actions", np.zeros((rows, 0), np.int32))
        return Chosen(continuous, discrete), found["recurrent_out"][:, 0] if self.carried else memory
