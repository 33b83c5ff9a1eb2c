"""Defines the simulators that the supervisor launches: built-in ones, bridges and foreign commands."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Final

from pydantic import Field, ValidationInfo, field_validator, model_validator

from sparring.pipeline.errors import did_you_mean
from sparring.pipeline.games.registry import names, option_text, option_types, required_options
from sparring.pipeline.networks.settings import StrictSettings

Option = bool | int | float | str

_PLACEHOLDER: Final = re.compile(r"\{(\w+)\}")
_TYPE_NAMES: Final = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


class SimulatorSettings(StrictSettings):
    """Configures simulators, by either a `name` or a `command`.

    Attributes:
        name: name of a built-in simulator or bridge, as in `sparring simulator NAME`.
        command: program and arguments of a foreign simulator; {address}, {number} and {seed} in an argument are
            replaced by the address to connect to, its number in the run and its seed.
        count: number of such processes.
        areas: copies of the environment in each process; for a `name` only.
        options: further options of the built-in simulator or bridge; for a `name` only.
        seed: seed of the first process, the next ones count up; None computes it from the run's seed.
    """

    name: str | None = None
    command: tuple[str, ...] | None = Field(default=None, min_length=1)
    count: int = Field(default=1, ge=1)
    areas: int = Field(default=1, ge=1)
    options: dict[str, Option] = Field(default={}, validate_default=True)
    seed: int | None = Field(default=None, ge=0, lt=2**31)

    @field_validator("name")
    @classmethod
    def _built_in(cls, name: str | None) -> str | None:
        if name is not None and name not in names():
            remedy = did_you_mean(name, names()) or "give the command of a simulator that is not built in"
            raise ValueError(f"got {name!r}; expected one of {', '.join(names())}; {remedy}")
        return name

    @field_validator("options", mode="before")
    @classmethod
    def _scalars(cls, options: object) -> object:
        if isinstance(options, dict) and isinstance(options.get("wrappers"), list | tuple):
            options = {**options, "wrappers": json.dumps(options["wrappers"])}
        for key, value in options.items() if isinstance(options, dict) else ():
            if not isinstance(value, bool | int | float | str):
                raise ValueError(  # noqa: TRY004 - a TypeError would pass through pydantic
                    f"got {'nothing' if value is None else 'a list or mapping'} for the option {key}; "
                    "expected true, false, a number or a text; write one such value"
                )
        return options

    @field_validator("options")
    @classmethod
    def _known_options(cls, options: dict[str, Option], info: ValidationInfo) -> dict[str, Option]:
        name = info.data.get("name")
        known, free = option_types(name) if name is not None else ({}, True)
        if wrong := next((key for key in ("areas", "num_envs", "n_envs") if key in options and key not in known), ""):
            raise ValueError(
                f"got {wrong} among the options; expected areas beside them; write areas: {options[wrong]} there"
            )
        for key, value in options.items():
            wanted = known.get(key, ())
            if not free and key not in known:
                raise ValueError(
                    f"got the unknown option {key!r} of {name}; expected one of {', '.join(known) or 'none'}; "
                    + (did_you_mean(key, known) or "remove it")
                )
            if wanted and type(value) not in (*wanted, *((int,) if float in wanted else ())):
                raise ValueError(
                    f"got {value!r} for the option {key} of {name}; "
                    f"expected {' or '.join(_TYPE_NAMES[kind] for kind in wanted)}; correct the value"
                )
        if missing := [] if name is None else [key for key in required_options(name) if key not in options]:
            near = difflib.get_close_matches(missing[0], options.keys() - known.keys(), n=1)
            remedy = f"write {missing[0]} in place of {near[0]}" if near else ""
            raise ValueError(
                f"got {name} without the option {missing[0]}; expected it, there is no default; "
                + (remedy or f"write options: {{{missing[0]}: ...}} beside the name")
            )
        return options

    @field_validator("command")
    @classmethod
    def _known_placeholders(cls, command: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for argument in command or ():
            for word in _PLACEHOLDER.findall(argument):
                if word not in ("address", "number", "seed"):
                    raise ValueError(
                        f"got {{{word}}} in {argument!r}; "
                        "expected only {address}, {number} and {seed} in braces; correct the placeholder"
                    )
        return command

    @model_validator(mode="after")
    def _one_way_to_start(self) -> SimulatorSettings:
        if (self.name is None) == (self.command is None):
            got = "neither name nor command" if self.name is None else "name and command together"
            raise ValueError(
                f"got {got}; expected one of them; name a built-in simulator, or give the command of a foreign one"
            )
        if self.command is not None and (self.areas != 1 or self.options):
            raise ValueError(
                "got areas or options beside a command; expected them at a built-in simulator only; "
                "write them as arguments of the command"
            )
        return self

    def words(self, others: Mapping[str, Option]) -> list[str]:
        """Returns areas and options, and other options before them, as arguments of the command line."""
        found = ["--areas", str(self.areas)]
        for key, value in {**others, **self.options}.items():
            found += ["--option", f"{key}={option_text(value)}"]
        return found

    def arguments(self, *, address: str, number: int, seed: int) -> list[str]:
        """Returns `command` with its placeholders filled in; empty for a `name`.

        Args:
            address: address to connect to.
            number: number of this process in the run, from 0.
            seed: seed of its random source.
        """
        values = {"address": address, "number": str(number), "seed": str(seed)}
        return [_PLACEHOLDER.sub(lambda found: values[found[1]], argument) for argument in self.command or ()]
