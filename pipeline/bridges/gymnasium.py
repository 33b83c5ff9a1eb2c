"""Plays Gymnasium environments as a game: each area is one environment and one agent.

A report holds the end of an episode and the first observation of the next one, so that a reset takes no frame.
`terminated` is an end, `truncated` an interruption.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.bridges.actions import Actions, note_unread_masks
from sparring.pipeline.bridges.explain import (
    attribute,
    flag,
    hidden_by,
    meant,
    naming_code,
    not_finite,
    not_imported,
    note_meant,
    number,
    place_of,
    returned,
    shown,
)
from sparring.pipeline.bridges.making import import_optional, read_wrappers, registered_by
from sparring.pipeline.bridges.observations import Observations, check_images
from sparring.pipeline.bridges.spaces import MASK, Option, Value, kept
from sparring.pipeline.bridges.video import make_areas
from sparring.pipeline.errors import NOTICE, SettingsError
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport, Decisions, Ends
from sparring.pipeline.simulation.game import decisions, ends
from sparring.pipeline.specs import Array, BehaviorId, BehaviorSpec, SpecError

if TYPE_CHECKING:
    from gymnasium import Env, Space
    from gymnasium.vector import VectorEnv

Observe = Callable[["Space[Value]"], Observations]
"""Makes the reader of an observation space."""

_RESET: Final = ("observation", "info")
_STEP: Final = ("observation", "reward", "terminated", "truncated", "info")
_ASKED: Final = {
    "max_episode_steps": (
        "a vector form that takes the max_episode_steps of its registration",
        "let its __init__ take them, or leave them out of register()",
    ),
    "num_envs": ("a vector form that takes num_envs, the number of areas", "let its __init__ take it"),
    "render_mode": ("an environment that takes render_mode, which a video needs", "let its __init__ take it"),
}
"""What is expected of the arguments of a constructor that Gymnasium calls, and the remedy."""
_NATIVE_FROM = 8
"""Number of areas from which an environment's own vector form is faster than a loop over its single form."""


def make_gymnasium(
    env_id: str,
    areas: int = 1,
    *,
    behavior: str | None = None,
    vectorization: str = "auto",
    wrappers: str = "",
    brightest: int = 255,
    images: str | None = None,
    video: str = "",
    **options: Option,
) -> GymnasiumGame | NativeGame:
    """Returns a Gymnasium environment as a game.

    Args:
        env_id: id for `gymnasium.make`; `module:Name-v0` imports the module that registers it.
        areas: number of environments side by side, 1 or more.
        behavior: name of the behavior; None takes the id without namespace and version.
        vectorization: `sync` steps single environments, `native` the environment's own vector form,
            `auto` the faster of the two.
        wrappers: classes to wrap each environment in, innermost first, see `read_wrappers`.
        brightest: largest value in images of bytes, which are scaled to 0..255; 1 for maps of 0 and 1.
        images: names of the observations that are images, see `Observations`.
        video: file for a video of the first area of the first simulator; "" for none.
        options: keyword arguments of the environment.

    Raises:
        SettingsError: the package or environment is missing, or an option is unknown.
        SpecError: a space is not supported.
    """
    gymnasium = import_optional("gymnasium", "gymnasium")

    if areas < 1 or vectorization not in ("auto", "sync", "native") or brightest not in range(1, 256):
        raise SettingsError(
            f"got areas={areas}, vectorization={vectorization!r} and brightest={brightest!r}; expected 1 or more "
            "areas, auto, sync or native, and a whole number from 1 to 255; correct the simulator's options"
        )
    _check_module(env_id)
    name = behavior or re.sub(r"-v\d+$", "", env_id.split(":")[-1].split("/")[-1]) or env_id
    classes, observe = read_wrappers(wrappers), partial(Observations, brightest=brightest, images=images)
    try:
        game: GymnasiumGame | NativeGame
        vector = _vector_form(env_id, areas, vectorization, options, wrapped=bool(classes), video=video)
        if vector is not None:
            game = NativeGame(name, vector, observe)
        else:  # what `make` returns is checked here
            make = partial(gymnasium.make, env_id, disable_env_checker=True, **options)
            game = GymnasiumGame(name, make_areas(make, areas, classes, video), observe)
        note_meant(options, make_gymnasium)
        return check_images(game, images)
    except (gymnasium.error.Error, TypeError, ImportError, AttributeError, ValueError) as error:
        if isinstance(error, AttributeError | ValueError) and place_of(error):
            raise
        raise _refusal(env_id, options, error) from error


def _check_module(env_id: str) -> None:
    """Refuses a path in the place of a module.

    Raises:
        SettingsError: it is one.
    """
    before, colon, plain = env_id.rpartition(":")
    if colon and not (before and plain):
        raise SettingsError(f"got environment {env_id!r}; expected MODULE:ID, or an ID alone; write both, or no colon")
    module = (before or plain).replace("\\", "/")
    if module.endswith(".py") or module.startswith((".", "/", "~")) or ":" in module:
        own = Path(module)
        found = f"{own.stem}{colon}{plain if before else ''}"
        raise SettingsError(
            f"got environment {env_id!r}, a path; expected the name of a module, as MODULE:ID; write {found}, and give "
            f"its folder, {own.parent}, as pipeline.python_path or --python-path"
        )


def _vector_form(
    env_id: str, areas: int, vectorization: str, options: Mapping[str, Any], *, wrapped: bool, video: str
) -> VectorEnv[Value, Value, Array] | None:
    """Returns the vector form of an environment if it is asked for, the only form, or the faster one; else None.

    Raises:
        SettingsError: it is needed, and cannot be used.
        SpecError: it has another number of areas.
    """
    import gymnasium

    has_single, has_vector = _forms(env_id)
    is_needed = vectorization == "native" or (has_vector and not has_single and vectorization == "auto")
    if is_needed and (wrapped or video):
        remedy = "leave vectorization out" if has_single else f"register {env_id!r} with entry_point= as well"
        got, other = ("wrappers", "the wrappers") if wrapped else (f"the video {video}", "the video")
        expected = "a single form, of which these are"
        raise SettingsError(f"got {got} with a vector form; expected {expected}; {remedy}, or leave out {other}")
    if not is_needed:
        if not has_vector or areas < _NATIVE_FROM or video or vectorization != "auto":
            return None
        if options or wrapped:
            _note_unused_vector(env_id, areas, "options and wrappers are for its single form")
            return None
    vector = gymnasium.make_vec(env_id, areas, vectorization_mode="vector_entry_point", **options)
    mode = vector.metadata.get("autoreset_mode")
    if mode == gymnasium.vector.AutoresetMode.NEXT_STEP:
        if (found := attribute(vector, "num_envs")) != areas:
            got, expected = f"num_envs {found} of the vector form of {env_id!r}", f"{areas}, as asked for"
            raise SpecError(got=got, expected=expected, remedy="set self.num_envs to the argument num_envs")
        return vector
    vector.close()
    if not is_needed:
        _note_unused_vector(env_id, areas, f"metadata['autoreset_mode'] is {mode}, not AutoresetMode.NEXT_STEP")
        return None
    remedy = "reset an area in the step after its end, and say so in metadata"
    raise SettingsError(
        f"got the vector form of {env_id!r} with metadata['autoreset_mode'] {mode}; expected "
        "AutoresetMode.NEXT_STEP, because a step must return the last observation of an episode; "
        + (f"{remedy}, or leave vectorization out" if has_single else remedy)
    )


def _note_unused_vector(env_id: str, areas: int, why: str) -> None:
    """Notes on standard error why the vector form of an environment is not used."""
    sys.stderr.write(
        f"{NOTICE}the vector form of {env_id!r} is not used, because {why}; {areas} single environments are stepped\n"
    )


def _refusal(env_id: str, options: Mapping[str, Option], error: Exception) -> SettingsError:
    """Returns the error of an environment that cannot be made."""
    import gymnasium

    got = f"environment {env_id!r}"
    match error:
        case gymnasium.error.UnregisteredEnv():
            expected, remedy = "a registered id", _registration(env_id)
        case ImportError():
            expected, remedy = not_imported(env_id.partition(":")[0], error)
        case gymnasium.error.Error() if "vector entry point" in str(error):
            expected, remedy = "a vector form of its own", "leave vectorization out, or register vector_entry_point="
        case gymnasium.error.Error() if not _forms(env_id)[0]:
            expected, remedy = "a single form, which this one lacks", "leave vectorization out, for its vector form"
        case TypeError() if "must inherit from" in str(error):
            expected = "a subclass of gymnasium.Env"
            remedy = "derive it from that, or register a vector environment with vector_entry_point="
        case TypeError() if "multiple values for" in str(error):
            expected, remedy = (
                "options that are not set already",
                "leave it out; areas: N is the number of environments",
            )
        case TypeError() if asked := next((one for one in _ASKED if f"argument '{one}'" in str(error)), ""):
            expected, remedy = _ASKED[asked]
        case ValueError() | AttributeError() if getattr(error, "name", "") != "unwrapped":
            expected, remedy = "a class, or its place as MODULE:CLASS, as entry_point", "correct its registration"
        case AttributeError():
            expected, remedy = "a vector form that is a subclass of gymnasium.vector.VectorEnv", "derive it from that"
        case TypeError() if options:
            got, expected = f"{got} with options {options}", "an environment that takes its options"
            remedy = meant(options, make_gymnasium) or "correct the options, or the environment"
        case TypeError():
            expected, remedy = "an environment that needs no options", "give those that it needs, or correct it"
        case _:
            expected, remedy = "an environment that can be made", "do what the message says"
    return SettingsError(f"got {got}: {str(error).rstrip('.')}{place_of(error)}; expected {expected}; {remedy}")


def _registration(env_id: str) -> str:
    """Returns the remedy for an id that Gymnasium does not know, which may be the name of a module."""
    module, _, plain = env_id.rpartition(":")
    if not module and (not plain.isidentifier() or importlib.util.find_spec(plain) is None):
        return f"correct it, or write MODULE:{env_id} with the module that registers it"
    found = importlib.import_module(module or plain)
    if hasattr(found, "__path__") and plain.isidentifier() and importlib.util.find_spec(f"{found.__name__}.{plain}"):
        return f"write name: pettingzoo, and env_id: {found.__name__}.{plain}"
    if others := registered_by(module or plain):
        return f"write {difflib.get_close_matches(env_id, others, n=1, cutoff=0)[0]}"
    if hasattr(found, "parallel_env") or hasattr(found, "env"):
        return f"write name: pettingzoo for the environment of the module {module or plain}"
    if hidden := hidden_by(found):
        return hidden
    if found.__file__ is None:  # a folder without __init__.py
        return f"write {found.__name__}.MODULE:{plain} with the module in {found.__path__[0]} that registers it"
    return f"let {found.__file__} register it, by gymnasium.register(id={plain!r}, entry_point=...)"


def _forms(env_id: str) -> tuple[bool, bool]:
    """Returns whether an environment has a single form, and one of its own for several areas."""
    import gymnasium

    module, _, plain = env_id.rpartition(":")
    if module:
        importlib.import_module(module)  # registers the environment
    try:
        spec = gymnasium.spec(plain)
    except gymnasium.error.Error:  # `make` takes an id without version as the last one
        return True, False
    return spec.entry_point is not None, bool(spec.vector_entry_point and not spec.additional_wrappers)


class _GymnasiumBase:
    """Holds what both forms share: specs, ids, and reports of one behavior."""

    env: Value

    def __init__(self, name: str, areas: int, seen: Space[Value], done: Space[Value], observe: Observe) -> None:
        self.name = name
        self._behavior = str(BehaviorId(name=name))
        self._observations = observe(seen)
        self._actions = Actions(done)
        self._areas = np.arange(areas, dtype=np.int64)
        self._is_new = True

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        """Returns the spec of the one behavior."""
        spec = BehaviorSpec(observations=self._observations.specs, actions=self._actions.spec)
        return {self._behavior: spec}

    def _note_masks(self, info: Mapping[str, Value]) -> None:
        """Notes after the first reset which keys look like masks that are not read."""
        if self._is_new:
            self._is_new = False
            note_unread_masks(self._actions.spec, self._observations.specs, info)
            if callable(getattr(getattr(self.env, "unwrapped", None), "action_masks", None)) and MASK not in info:
                sys.stderr.write(f"{NOTICE}action_masks() is not called; a mask of actions is info[{MASK!r}]\n")

    def _report(self, decisions: Decisions, ends: Ends | None = None) -> Sequence[BehaviorReport]:
        return (BehaviorReport(behavior=self._behavior, decisions=decisions, ends=ends),)


class GymnasiumGame(_GymnasiumBase):
    """Steps single environments in a loop, and resets an ended one in the same frame.

    Args:
        name: name of the behavior.
        envs: one environment for each area, all with the same spaces.
        observe: reads the observation space.
    """

    def __init__(self, name: str, envs: Sequence[Env[Value, Value]], observe: Observe = Observations) -> None:
        seen, done = (attribute(envs[0], space) for space in ("observation_space", "action_space"))
        super().__init__(name, len(envs), seen, done, observe)
        self._envs, self.env = list(envs), envs[0]
        self._parameters: Mapping[str, float] = {}

    @naming_code
    def reset(self, parameters: Mapping[str, float], seed: int | None) -> Sequence[BehaviorReport]:
        """Begins all episodes. Parameters go to the environments as reset options; area i gets seed + i."""
        self._parameters = parameters
        seeds = [None if seed is None else seed + area for area in range(len(self._envs))]
        options = dict(parameters) or None
        begun = [
            returned("reset", env.reset(seed=one, options=options), _RESET)
            for env, one in zip(self._envs, seeds, strict=True)
        ]
        seen, infos = zip(*begun, strict=True)
        self._note_masks(infos[0])
        rows = self._rows(self._areas, seen)
        return self._report(decisions(self._areas, rows, masks=self._masks(self._areas, infos)))

    @naming_code
    def step(self, actions: Mapping[str, BehaviorActions]) -> Sequence[BehaviorReport]:
        """Steps every area that got an action."""
        act = actions.get(self._behavior)
        if act is None or not len(act.agents):
            return ()
        rewards = np.zeros(len(act.agents), np.float32)
        seen, infos, rows, last, interrupted = [], [], [], [], []
        values = self._actions.rows(act.continuous, act.discrete)
        for row, (area, value) in enumerate(zip(act.agents.tolist(), values, strict=True)):
            env = self._envs[area]
            observation, reward, terminated, truncated, info = returned("step", env.step(value), _STEP)
            rewards[row] = number(reward, area)
            terminated, truncated = flag(terminated, "terminated", area), flag(truncated, "truncated", area)
            if terminated or truncated:
                rows.append(row)
                last.append(kept(observation))
                interrupted.append(not terminated)
                observation, info = returned("reset", env.reset(options=dict(self._parameters) or None), _RESET)
            seen.append(observation)
            infos.append(info)
        ended = None
        if rows:
            over = act.agents[rows]
            ended = ends(over, self._rows(over, last), rewards=rewards[rows], interrupted=interrupted)
            rewards[rows] = 0
        masks = self._masks(act.agents, infos, rows)
        found = self._rows(act.agents, seen, rows)
        return self._report(decisions(act.agents, found, rewards=rewards, masks=masks), ended)

    def close(self) -> None:
        """Closes the environments."""
        for env in self._envs:
            env.close()

    def _rows(self, areas: NDArray[np.int64], seen: Sequence[Value], begun: Collection[int] = ()) -> tuple[Array, ...]:
        """Returns the columns of observations, of which some rows have `begun` an episode within a step."""
        return self._observations.rows(seen, partial(_whose, areas, begun))

    def _masks(
        self, areas: NDArray[np.int64], infos: Sequence[Mapping[str, Value]], begun: Collection[int] = ()
    ) -> NDArray[np.bool_] | None:
        masks = [info.get("action_mask") for info in infos]
        return self._actions.forbidden(masks, partial(_whose, areas, begun))


def _whose(areas: NDArray[np.int64], begun: Collection[int], row: int) -> str:
    """Says in messages whose value that of a row is, and where a step has got it from."""
    return f" of area {areas[row]}" + " from reset()" * (row in begun)


class NativeGame(_GymnasiumBase):
    """Steps an environment's own vector form, which resets an ended area in the following frame.

    An area does not decide in the frame of its end. If all areas end at once, the following frame belongs to the same
    report, so that a report always holds a decision.

    Args:
        name: name of the behavior.
        vector: a vector environment with AutoresetMode.NEXT_STEP.
        observe: reads the observation space.
    """

    def __init__(self, name: str, vector: VectorEnv[Value, Value, Value], observe: Observe = Observations) -> None:
        seen, done = (attribute(vector, f"single_{space}") for space in ("observation_space", "action_space"))
        super().__init__(name, attribute(vector, "num_envs"), seen, done, observe)
        self._vector = self.env = vector
        self._begins = np.zeros(vector.num_envs, np.bool_)
        """Areas whose next step begins an episode."""
        self._is_quiet = True
        idle = np.zeros((1, self._actions.spec.continuous), np.float32)
        still = np.zeros((1, len(self._actions.spec.discrete)), np.int32)
        self._idle = np.repeat(self._actions.batch(idle, still), vector.num_envs, axis=0)

    @naming_code
    def reset(self, parameters: Mapping[str, float], seed: int | None) -> Sequence[BehaviorReport]:
        """Begins all episodes. Parameters go to the environment as reset options."""
        begun = self._vector.reset(seed=seed, options=dict(parameters) or None)
        observations, infos = returned("reset", begun, _RESET)
        self._note_masks(infos)
        return self._report(decisions(self._areas, self._columns(observations), masks=self._masks(infos, self._areas)))

    @naming_code
    def step(self, actions: Mapping[str, BehaviorActions]) -> Sequence[BehaviorReport]:
        """Steps all areas; those that ended before get no action and begin their next episode."""
        values = self._idle.copy()
        if act := actions.get(self._behavior):
            values[act.agents] = self._actions.batch(act.continuous, act.discrete)
        observations, rewards, terminated, truncated, infos = returned("step", self._vector.step(values), _STEP)
        for part, column in (("reward", rewards), ("terminated", terminated), ("truncated", truncated)):
            kinds, kind = ("biuf", "numbers") if part == "reward" else ("b", "bool")
            if np.shape(column) != self._areas.shape or np.asarray(column).dtype.kind not in kinds:
                raise _wrong_column(part, column, f"an array {self._areas.shape} of {kind}, an entry for each area")
        rewards, terminated, truncated = np.asarray(rewards, np.float32), np.asarray(terminated), np.asarray(truncated)
        if not np.isfinite(rewards).all():
            area = int(np.argmin(np.isfinite(rewards)))
            raise not_finite(rewards[area], f"reward of area {area}")
        seen = self._columns(observations)
        over = terminated | truncated
        self._check_begun(over, rewards)
        if not over.any():
            return self._report(decisions(self._areas, seen, rewards=rewards, masks=self._masks(infos, self._areas)))
        last = tuple(one[over] for one in seen)
        ended = ends(self._areas[over], last, rewards=rewards[over], interrupted=~terminated[over])
        if over.all():
            observations, rewards, terminated, truncated, infos = self._vector.step(self._idle)
            self._check_begun(terminated | truncated, rewards)
            masks = self._masks(infos, self._areas)
            return self._report(decisions(self._areas, self._columns(observations), masks=masks), ended)
        on = self._areas[~over]
        masks = self._masks(infos, on)
        return self._report(decisions(on, tuple(one[on] for one in seen), rewards=rewards[on], masks=masks), ended)

    def close(self) -> None:
        """Closes the environment."""
        self._vector.close()

    def _check_begun(self, over: NDArray[np.bool_], rewards: Array) -> None:
        """Checks the step that begins the next episode of areas that have ended.

        Raises:
            SpecError: an area has ended again.
        """
        begun, self._begins = self._begins, over
        if (again := np.flatnonzero(begun & over)).size:
            raise SpecError(
                got=f"another end of area {again[0]} from step() at the step after its end",
                expected="that step to begin its next episode, as AutoresetMode.NEXT_STEP says",
                remedy="reset the area there, and return its first observation, with terminated and truncated False",
            )
        if self._is_quiet and (paid := np.flatnonzero(begun & (rewards != 0))).size:
            self._is_quiet = False
            sys.stderr.write(
                f"{NOTICE}area {paid[0]} has a reward of {rewards[paid[0]]:g} at the step that begins its episode, "
                "whose action is not used; with AutoresetMode.NEXT_STEP an area is reset in the step after its end\n"
            )

    def _columns(self, observations: Value) -> tuple[Array, ...]:
        columns = self._observations.batch(observations)
        for spec, column in zip(self._observations.specs, columns, strict=True):
            if len(column) != len(self._areas):
                raise _wrong_column(f"observation {spec.name!r}", column, f"{len(self._areas)} rows, one for each area")
        return columns

    def _masks(self, infos: Mapping[str, Value], areas: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Returns the masks of some areas; `_action_mask` says which have one, as in the infos of all vectors."""
        if (masks := infos.get("action_mask")) is None:
            return self._actions.forbidden([])
        if len(masks) != len(self._areas):
            raise _wrong_column("info['action_mask']", masks, f"{len(self._areas)} masks, one for each area")
        given = infos.get("_action_mask", np.ones(len(masks), np.bool_))
        some = [masks[area] if given[area] else None for area in areas]
        return self._actions.forbidden(some, lambda row: f" of area {areas[row]}")


def _wrong_column(name: str, value: Value, expected: str) -> SpecError:
    return SpecError(got=f"{shown(value)} as {name}", expected=expected, remedy="correct what the environment returns")
