"""Rules that hold for every key."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from sparring.pipeline.learning.sac_settings import SACHyperparameters
from sparring.pipeline.settings import Settings
from sparring.pipeline.settings.document import Entry, parse
from sparring.pipeline.settings.explain import all_keys, known_keys, models
from sparring.pipeline.settings.model import BehaviorSettings
from tests.settings.settings_texts import EVERY_KEY, EVERY_KEY_OF_SAC, NAME, loaded, problems

UNBOUNDED = {"initial_elo", "min_value", "max_value", "mean", "mass", "value"}


@dataclass(frozen=True)
class Line:
    """A line of `EVERY_KEY` that holds a key of the models."""

    number: int
    key: str
    value: str

    def replaced(self, key: str, value: str, text: str = EVERY_KEY) -> str:
        """Returns the text with another key and value in this line."""
        lines = text.splitlines()
        lines[self.number - 1] = re.sub(rf"\b{self.key}:.*", f"{key}: {value}", lines[self.number - 1])
        return "\n".join(lines)


def _lines() -> list[Line]:
    keys = {key for _, key in all_keys()} | {"mass", "discrete"}
    found = (re.match(r"[ -]*(\w+):(?: (.*))?$", line) for line in EVERY_KEY.splitlines())
    pairs = [(number, match) for number, match in enumerate(found, 1) if match and match[1] in keys]
    return [Line(number=number, key=match[1], value=match[2] or "") for number, match in pairs]


LINES = _lines()
KEYS = [line for line in LINES if line.key not in ("mass", "discrete")]
LEAVES = [line for line in LINES if line.value]


NUMBERS = [leaf for leaf in LEAVES if re.fullmatch(r"[\d.e+-]+", leaf.value) and leaf.key not in UNBOUNDED]
DOCUMENTS = 12
"""Documents among which the lines are divided: all problems of a document are reported at once."""


def divided(lines: list[Line]) -> pytest.MarkDecorator:
    """Runs a test with every twelfth line, from each of the first twelve on."""
    return pytest.mark.parametrize("lines", [lines[at::DOCUMENTS] for at in range(DOCUMENTS)], ids=range(DOCUMENTS))


def check_each(lines: Sequence[Line], wrong: Callable[[Line], str], word: str) -> None:
    """Checks that a document with wrong values in these lines has a problem with a word at each of them."""
    text = EVERY_KEY
    for line in lines:
        text = line.replaced(line.key, wrong(line), text)
    found = problems(text)
    for line in lines:
        assert any(_is_at(line, problem) and word in problem for problem in found), (line, found)


def _is_at(line: Line, problem: str) -> bool:
    return problem.startswith(f"{NAME}:{line.number}: ")


def _written(entry: Entry, section: str = "") -> set[tuple[str, str]]:
    """Returns every (section, key) of a document with the section names of `all_keys`."""
    found = set()
    for key, child in entry.mapping.items():
        known = bool({(section, key)} & set(all_keys()))
        found |= {(section, key)} if known else set()
        found |= _written(child, f"{section}.{key if known else '*'}".removeprefix("."))
    for child in entry.items:
        found |= _written(child, f"{section}[]")
    return found


def test_the_sample_text_contains_every_key() -> None:
    networks = [f"{name}.network_settings" for name in ("extrinsic", "curiosity", "rnd")]
    alike = (*networks, "value.sampler_parameters")
    expected = {(section, key) for section, key in all_keys() if not any(part in section for part in alike)}
    assert expected <= _written(parse(EVERY_KEY, NAME)) | _written(parse(EVERY_KEY_OF_SAC, NAME))


@pytest.mark.parametrize("text", [EVERY_KEY, EVERY_KEY_OF_SAC], ids=["others", "sac"])
def test_every_key_is_accepted_and_survives_json(text: str) -> None:
    settings = loaded(text).settings
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_no_value_of_the_sample_text_is_a_default() -> None:
    settings = loaded(EVERY_KEY).settings
    ball = settings.behaviors["Ball"]
    sac = loaded(EVERY_KEY_OF_SAC).settings.behaviors["Pole"].hyperparameters
    same = {"trainer_type", "beta_schedule", "train_model", "load_model", "resume", "inference"}
    for model in (ball.hyperparameters, sac, ball.network_settings, ball, settings.pipeline, settings.env_settings):
        for key, info in type(model).model_fields.items():
            assert key in same or getattr(model, key) != info.default, key


@st.composite
def misspellings(draw: st.DrawFn) -> tuple[Line, str]:
    """Samples a key with one letter missing, doubled, or swapped with the next."""
    line = draw(st.sampled_from([one for one in KEYS if one.key not in ("num_cpus", "num_gpus")]))  # alike themselves
    at = draw(st.integers(0, len(line.key) - 2))
    key = line.key
    wrong = draw(
        st.sampled_from(
            [
                key[:at] + key[at + 1 :],
                key[: at + 1] + key[at:],
                key[:at] + key[at + 1] + key[at] + key[at + 2 :],
            ]
        ).filter(lambda text: text != key)
    )
    return line, wrong


@given(misspellings())
def test_a_misspelt_key_is_reported_with_its_line_and_the_nearest_key(case: tuple[Line, str]) -> None:
    line, wrong = case
    found = [problem for problem in problems(line.replaced(wrong, line.value)) if _is_at(line, problem)]
    assert any(f"got the unknown key {wrong!r}" in p and f"did you mean {line.key}?" in p for p in found), found


@divided(LEAVES)
@pytest.mark.parametrize("wrong", ["{}", "[[]]"])
def test_a_mapping_or_list_in_place_of_a_value_is_reported_with_its_line(lines: Sequence[Line], wrong: str) -> None:
    check_each(lines, lambda _: wrong, "expected")


@divided(LEAVES)
def test_a_value_of_another_scalar_type_is_reported_with_its_line(lines: Sequence[Line]) -> None:
    def wrong(line: Line) -> str:
        return "maybe" if re.fullmatch(r"true|false|[\d.e+-]+", line.value) else "12"

    check_each(lines, wrong, "expected")


@divided(NUMBERS)
def test_a_number_out_of_range_is_reported_with_its_line(lines: Sequence[Line]) -> None:
    check_each(lines, lambda _: "-7", "got")


@pytest.mark.parametrize(
    "line", [k for k in KEYS if not k.value and k.key != "value"], ids=lambda line: f"{line.number}-{line.key}"
)
def test_a_scalar_in_place_of_a_section_is_reported_with_its_line(line: Line) -> None:
    indent = len(re.match(r"[ -]*", EVERY_KEY.splitlines()[line.number - 1])[0])  # type: ignore[index]
    lines = line.replaced(line.key, "12").splitlines()
    below = lines[line.number :]
    keep = next((i for i, text in enumerate(below) if len(text) - len(text.lstrip(" -")) <= indent), len(below))
    text = "\n".join([*lines[: line.number], *below[keep:]])
    assert any(_is_at(line, problem) and "got 12" in problem for problem in problems(text))


DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def _documented() -> dict[tuple[str, str], str]:
    """Returns the defaults in the tables of the document by heading and key."""
    rows: dict[tuple[str, str], str] = {}
    heading = ""
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if title := re.match(r"#+ `?(.*?)`?$", line):
            heading = title[1]
        elif row := re.match(r"\| `(\w+)` \| .* \| (.*?) \| .*\|$", line):
            rows[heading, row[1]] = row[2].strip("`")
    return rows


def _default(value: object) -> str:
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return "its defaults"
    if value is None or value in ({}, ()):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _fields() -> list[tuple[str, str, object]]:
    """Returns heading, key and default of every key."""
    found: list[tuple[str, str, object]] = []
    for section, model in models():
        heading = re.sub(r"(\.\*|\[\])$", "", section).rpartition(".")[2] or "Top level"
        heading = "environment_parameters" if heading == "value" else heading
        heading = "Hyperparameters of sac" if model is SACHyperparameters else heading
        fields = model.model_fields
        made = {key: info.get_default(call_default_factory=True, validated_data={}) for key, info in fields.items()}
        found += [(heading, key, default) for key, default in made.items()]
    return found


@pytest.mark.parametrize(("heading", "key", "default"), _fields())
def test_every_key_is_documented_with_its_default(heading: str, key: str, default: object) -> None:
    documented = _documented()[heading, key]
    assert documented.replace(" ", "") in (_default(default).replace(" ", ""), "[[0,1]]")


def test_a_behavior_has_all_keys_flat() -> None:
    assert set(known_keys(("behaviors", "Any"))) == set(BehaviorSettings.model_fields)
