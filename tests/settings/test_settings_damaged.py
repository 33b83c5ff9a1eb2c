"""A damaged configuration gives settings or an error whose every line has a place, a cause and a remedy."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.settings import parse_settings
from tests.settings.settings_texts import EVERY_KEY, NAME

CONFIGS = Path(__file__).parents[2] / "configs"
TEXTS = [EVERY_KEY, *(path.read_text() for path in sorted(CONFIGS.glob("*.yaml")) if path.stat().st_size < 2000)]
SHORT = sorted(TEXTS, key=len)[:8]

PROBLEM = re.compile(rf"{re.escape(NAME)}(:\d+)?: .*(got|expected)", re.DOTALL)

UNUSUAL = st.sampled_from(
    [
        *("", "~", "null", "[]", "{}", "[[]]", "{a: {b: c}}", "-1", "0", "1e400", "-.inf", ".nan", "0x10", "9" * 30),
        *("'", '"', "&a", "*a", "&a [*a]", "!!python/object:os.system x", "!!binary aa", "? x", "| \n  x", "- - -"),
        *("<<: *a", "<<: [a]", "\0", "\x85", "%YAML 1.1", "---", "...", ": :", "]", "x" * 300, "5.0e5.", "yes", "\t"),
    ]
)  # fmt: skip


def edit(lines: list[str], kind: int, at: int, other: int, value: str) -> None:
    """Applies one change to a text."""
    at, other = at % len(lines), other % len(lines)
    head, colon, _ = lines[at].partition(":")
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(other, lines[at])
    elif kind == 2:
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == 3:
        lines[at] = f"{head}: {value}"
    elif kind == 4:
        lines[at] = f"  {lines[at]}" if other % 2 else lines[at].removeprefix("  ")
    elif kind == 5:
        lines[at] = head[: other % (len(head) + 1)] + value + head[other % (len(head) + 1) :] + colon
    elif kind == 6:
        lines[at] = lines[at].split(":")[0] + ":"
    else:
        lines[at] = lines[at][: other % (len(lines[at]) + 1)]
    if not lines:
        lines.append("")


EDITS = st.tuples(st.integers(0, 7), st.integers(0, 300), st.integers(0, 300), UNUSUAL)


@settings(max_examples=40)
@given(st.sampled_from(SHORT), st.lists(EDITS, min_size=1, max_size=4))
def test_a_damaged_configuration_is_read_or_refused_with_line_and_remedy(
    text: str, edits: list[tuple[int, int, int, str]]
) -> None:
    lines = text.splitlines()
    for change in edits:
        edit(lines, *change)
    try:
        found = parse_settings("\n".join(lines), NAME)
    except SettingsError as error:
        head, *problems = str(error).splitlines()
        assert head == f"{len(problems)} problem{'s' * (len(problems) > 1)} in {NAME}"
        for problem in problems:
            assert PROBLEM.match(problem), problem
            assert ";" in problem, problem
        return
    assert found.settings.behaviors
