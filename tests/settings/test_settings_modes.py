"""A configuration selects the mode and with it the step budget."""

from __future__ import annotations

import pytest

from tests.settings.settings_texts import loaded, only_problem


def _text(threaded: list[str], mode: str | None) -> str:
    behaviors = "".join(f"  B{i}: {{{f'threaded: {t}' if t else ''}}}\n" for i, t in enumerate(threaded))
    return f"behaviors:\n{behaviors}" + (f"pipeline: {{mode: {mode}}}\n" if mode else "")


@pytest.mark.parametrize(
    ("threaded", "mode", "overlap"),
    [
        ([""], None, 1),
        ([""], "overlap", 1),
        ([""], "lockstep", 0),
        (["true"], None, 1),
        (["false"], None, 0),
        (["true", ""], None, 1),
        (["false", ""], None, 0),
        (["true", "true"], "overlap", 1),
        (["false"], "lockstep", 0),
    ],
)
def test_threaded_and_mode_select_the_same_mode(threaded: list[str], mode: str | None, overlap: int) -> None:
    settings = loaded(_text(threaded, mode)).settings
    assert settings.overlap == overlap
    assert settings.mode == ("lockstep", "overlap")[overlap]


@pytest.mark.parametrize(
    ("threaded", "mode", "line"),
    [(["true", "false"], None, 2), (["true"], "lockstep", 2), (["", "false"], "overlap", 3)],
)
def test_threaded_that_contradicts_itself_or_the_mode_is_refused(
    threaded: list[str], mode: str | None, line: int
) -> None:
    problem = only_problem(_text(threaded, mode))
    assert problem.startswith(f"run.yaml:{line}: behaviors.B{line - 2}.threaded: got threaded ")


@pytest.mark.parametrize("threaded", ["true", ""])
def test_several_stepping_processes_need_overlap(threaded: str) -> None:
    assert loaded(_text([threaded], None) + "pipeline: {stepping_processes: 2}").settings.overlap == 1
    problem = only_problem(_text(["false"], None) + "pipeline:\n  stepping_processes: 2\n")
    assert problem.startswith("run.yaml:4: pipeline.stepping_processes: got 2 stepping processes in lockstep")


@pytest.mark.parametrize(("mode", "budget"), [("overlap", 24_000), ("lockstep", 12_000)])
def test_the_step_budget_is_one_buffer_or_two_with_overlap(mode: str, budget: int) -> None:
    text = f"behaviors: {{A: {{hyperparameters: {{buffer_size: 12000}}}}}}\npipeline: {{mode: {mode}}}"
    settings = loaded(text).settings
    assert settings.step_budget(settings.behaviors["A"]) == budget
