"""Makes the environments of a module, in their parallel form if they have one, else turn by turn."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sparring.pipeline.bridges.explain import hidden_by, meant, not_imported, note_meant, place_of, shown
from sparring.pipeline.bridges.making import import_optional, read_wrappers, registered_by
from sparring.pipeline.bridges.observations import Observations, check_images
from sparring.pipeline.bridges.pettingzoo.parallel import ParallelGame
from sparring.pipeline.bridges.pettingzoo.teams import Teams
from sparring.pipeline.bridges.pettingzoo.turns import TurnGame
from sparring.pipeline.bridges.spaces import Option, Value
from sparring.pipeline.bridges.video import make_areas
from sparring.pipeline.errors import NOTICE, SettingsError


def make_pettingzoo(
    env_id: str,
    areas: int = 1,
    *,
    behavior: str | None = None,
    behaviors: str = "one",
    teams: str = "shared",
    groups: bool = False,
    shared_reward: bool = False,
    outcomes: bool = False,
    wrappers: str = "",
    brightest: int = 255,
    images: str | None = None,
    video: str = "",
    **options: Option,
) -> ParallelGame | TurnGame:
    """Returns a PettingZoo environment as a game: in its parallel form if it has one, else turn by turn.

    Args:
        env_id: module of the environment, such as "mpe2.simple_spread_v3".
        areas: number of environments side by side, 1 or more.
        behavior: name of the behavior; None takes the module's name without version.
        behaviors: `one` name for all agents, or a name `per_type` (`adversary_0` -> `adversary`).
        teams: `shared` (all team 0), `each` (the i-th agent is team i) or `per_type` (the i-th type is team i).
        groups: agents of one team in one area are a group.
        shared_reward: each group gets the mean reward of its agents, and these get none of their own; parallel
            environments only.
        outcomes: the sign of an agent's last reward is its outcome: 1 won, 0.5 drawn, 0 lost; requires teams.
        wrappers: classes to wrap each environment in, innermost first, see `read_wrappers`.
        brightest: largest value in images of bytes, which are scaled to 0..255; 1 for maps of 0 and 1.
        images: names of the observations that are images, see `Observations`.
        video: file for a video of the first area of the first simulator; "" for none.
        options: keyword arguments of the environment.

    Raises:
        SettingsError: the package or environment is missing, or an option is unknown or impossible.
        SpecError: a space is not supported, or agents of one behavior have different spaces.
    """
    if areas < 1:
        raise SettingsError(f"got areas={areas}; expected 1 or more; correct the simulator's options")
    name = behavior or re.sub(r"_v\d+$", "", env_id.rpartition(".")[2])
    flags = {"groups": groups, "shared_reward": shared_reward, "outcomes": outcomes}
    try:
        roles = Teams(behavior=name, behaviors=behaviors, teams=teams, **flags)
    except SettingsError as error:
        if hint := meant(options, make_pettingzoo):
            raise SettingsError(f"{error}; {hint}") from None
        raise
    import_optional("pettingzoo", "pettingzoo")
    make, classes = _environment(env_id), read_wrappers(wrappers)
    try:
        envs = make_areas(partial(make, **options), areas, classes, video)
    except TypeError as error:
        remedy = meant(options, make_pettingzoo) or "check the environment's documentation"
        if "'render_mode'" in str(error):
            remedy = "let the function that makes it take render_mode, which a video needs"
        raise SettingsError(
            f"got options {options} for {env_id!r}: {error}{place_of(error)}; expected its own; {remedy}"
        ) from error
    note_meant(options, make_pettingzoo)
    form = TurnGame if hasattr(envs[0], "last") else ParallelGame
    if shared_reward and form is TurnGame:
        raise SettingsError(
            f"got shared_reward for the turn-based {name!r}; expected a parallel environment; "
            "leave the option out: agents that act in turn keep their own rewards"
        )
    observe = partial(Observations, brightest=brightest, images=images)
    return check_images(form(name, envs, roles, observe), images)


def _environment(env_id: str) -> Callable[..., Value]:
    """Returns the function that makes the environment, in its parallel form if it has one."""
    if "/" in env_id or env_id.endswith(".py") or env_id.startswith((".", "~")):
        path = Path(env_id)
        remedy = f"write {path.stem}, and give its folder, {path.parent}, as pipeline.python_path or --python-path"
        raise SettingsError(f"got environment {env_id!r}, a path; expected the name of a module; {remedy}")
    if ":" in env_id:
        own = env_id.partition(":")[0]
        remedy = f"write name: gymnasium for an id of Gymnasium, env_id: {own} for a module of PettingZoo"
        raise SettingsError(f"got {env_id!r}; expected a module of PettingZoo alone; {remedy}")
    try:
        with warnings.catch_warnings():
            # PettingZoo deprecates the module form in favor of a registry of its own environments.
            warnings.simplefilter("ignore", DeprecationWarning)
            module = importlib.import_module(env_id)
    except ImportError as error:
        expected, remedy = not_imported(env_id, error)
        if re.search(r"-v\d+$", env_id):
            expected, remedy = "a module of PettingZoo", "write name: gymnasium for an id of Gymnasium"
        got = f"environment {env_id!r}: {error}{place_of(error)}"
        raise SettingsError(f"got {got}; expected {expected}; {remedy}") from error
    forms: list[Callable[..., Value]] = []
    for name in ("parallel_env", "env"):
        if (found := getattr(module, name, None)) is not None:
            if not callable(found):
                got, expected = (
                    f"{shown(found)} as {name} of the module {env_id!r}",
                    "a function that makes the environment",
                )
                raise SettingsError(f"got {got}; expected {expected}; write def {name}(**options): return ...")
            forms.append(found)
    if forms:
        return forms[0] if len(forms) == 1 else _parallel_or_not(*forms)
    others = registered_by(env_id)
    remedy = f"write name: gymnasium and env_id: {others[0]}" if others else "define it, or name another module"
    bases = import_optional("pettingzoo", "pettingzoo")
    for one in vars(module).values():
        if isinstance(one, type) and one.__module__ == env_id and issubclass(one, bases.ParallelEnv | bases.AECEnv):
            form = "parallel_env" if issubclass(one, bases.ParallelEnv) else "env"
            remedy = f"write {form} = {one.__name__} below the class"
    remedy = hidden_by(module) or remedy
    raise SettingsError(f"got module {env_id!r} without parallel_env() and env(); expected one of them; {remedy}")


def _parallel_or_not(parallel: Callable[..., Value], in_turn: Callable[..., Value]) -> Callable[..., Value]:
    """Returns what makes the parallel form of an environment, or that in turn if PettingZoo refuses to convert it."""
    is_refused = False

    def make(**options: Option) -> Value:
        nonlocal is_refused
        if not is_refused:
            try:
                return parallel(**options)
            except AssertionError as error:
                if "is_parallelizable" not in str(error):
                    raise
            is_refused = True
            sys.stderr.write(f"{NOTICE}env() is played in turn, because parallel_env() cannot be made of it\n")
        return in_turn(**options)

    return make
