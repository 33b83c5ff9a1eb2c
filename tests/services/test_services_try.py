"""`sparring try` and `sparring check` show what an environment is read as, before anything is trained on it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.settings import parse_settings
from sparring.services.commands import evaluate, tryout
from sparring.services.main import main
from sparring.services.process.lifeline import children
from sparring.services.supervision.topology import build

EXAMPLES = Path(__file__).parent.parent.parent / "docs" / "examples"
HERE = str(Path(__file__).parent)

BOARD = """
import gymnasium
import numpy as np
from gymnasium import spaces


class Board(gymnasium.Env):
    observation_space = spaces.Box(0, 1, (6, 7, 2), np.int8)
    action_space = spaces.MultiDiscrete([7, 2])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros((6, 7, 2), np.int8), {}

    def step(self, action):
        self.steps += 1
        if self.steps == FAILS:
            return np.module()
        return np.ones((6, 7, 2), np.int8), 1.0, self.steps == 10, False, {}


gymnasium.register("Board-v0", Board)
"""


def environment(folder: Path, name: str, fails: int = 0, how: str = "return np.module()") -> None:
    """Writes a module that registers an environment, which fails at a step."""
    text = BOARD.replace("FAILS", str(fails)).replace("return np.module()", how)
    (folder / f"{name}.py").write_text(text.replace("Board-v0", f"{name}-v0"))


@pytest.fixture(autouse=True)
def _no_further_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that a command adds to the path are removed after the test."""
    monkeypatch.setattr("sys.path", [*__import__("sys").path])


@pytest.mark.parametrize("kind", ["observation", "action"])
def test_spaces_beyond_the_limits_of_a_run_are_refused_before_anything_is_made_of_their_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    name = f"vast_{kind}"
    environment(tmp_path, name)
    with (tmp_path / f"{name}.py").open("a") as module:
        module.write(f"Board.{kind}_space = spaces.Discrete(2**60)\n")
    assert main(["try", f"{name}:{name}-v0", "--python-path", str(tmp_path)]) == 1
    limit = {"observation": "observation_bytes", "action": "actions"}[kind]
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("sparring: got ")
    assert line.endswith(f"or raise pipeline.limits.{limit}")


def test_try_shows_what_is_read_and_plays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment(tmp_path, "board_a")
    arguments = ["try", "board_a:board_a-v0", "--python-path", str(tmp_path), "--areas", "2"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "board_a?team=0: agents 2; observations observation: vector 84; actions branches of 7, 2 choices" in out
    assert "observation has values from 0 to 1" in out
    assert "played 100 random steps (200 of agents)" in out
    assert "20 episodes ended, on average after 10 steps, with a return of 10" in out
    assert "notice: observation 'observation', a box of (6, 7, 2) int8, is read as a vector of 84 numbers" in err
    assert main([*arguments, "--option", "images=observation", "--steps", "3"]) == 0
    out, err = capsys.readouterr()
    assert "observation: image 2 x 6 x 7 of floats" in out
    assert err == ""


def test_try_knows_each_form_of_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    """It is a built-in simulator, an id of Gymnasium, a module of PettingZoo, or a configuration."""
    for name, shown in (
        ("goal", "Goal?team=0: agents 1"),
        ("CartPole-v1", "CartPole?team=0: agents 1; observations observation: vector 4"),
        (str(EXAMPLES / "highest.yaml"), "masks yes"),
        ("mpe2.simple_spread_v3", "simple_spread?team=0: agents 3"),
    ):
        assert main(["try", name, "--steps", "5"]) == 0
        assert shown in capsys.readouterr().out
    for wrong in (["soccer", "--areas", "0"], ["soccer", "--option", "rivels=still"], ["gymnasium"]):
        assert main(["try", *wrong]) == 2
        assert capsys.readouterr().err.startswith("sparring: got ")
    for unused in (["soccer", "--set", "a=1"], [str(EXAMPLES / "highest.yaml"), "--option", "size=7"]):
        assert main(["try", *unused]) == 2
        assert f"got {unused[1]} for {unused[0]}; expected it " in capsys.readouterr().err
    assert main(["try", "no_such_module"]) == 2
    assert "No module named 'no_such_module'" in capsys.readouterr().err


def test_file_with_the_name_of_a_built_in_simulator_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for noted in (0, 1):
        assert main(["try", "tag", "--steps", "1"]) == 0
        assert capsys.readouterr().err.count("tag is the built-in simulator; to try tag.py, rename it") == noted
        (tmp_path / "tag.py").touch()


def test_module_in_the_working_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment(tmp_path, "board_w")
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    assert main(["try", "board_w:board_w-v0"]) == 0


def test_failure_of_an_environment_is_shown_with_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment(tmp_path, "board_b", fails=3)
    assert main(["try", "board_b:board_b-v0", "--python-path", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert f'{tmp_path / "board_b.py"}", line 19' in err
    assert "sparring try: board_b:board_b-v0 failed at step 3" in err
    assert f"({tmp_path / 'board_b.py'}:19)\n" in err
    assert "tryout.py" not in err


def test_environment_that_ends_the_process_is_shown_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment(tmp_path, "board_e", fails=2, how="raise SystemExit(3)")
    assert main(["try", "board_e:board_e-v0", "--python-path", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines()[-2:] == [
        f"SystemExit: 3 ({tmp_path / 'board_e.py'}:19)",
        "sparring try: board_e:board_e-v0 failed at step 2, in step()",
    ]


def test_environment_that_cannot_be_closed_is_shown_like_any_other_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that has failed before is shown with its first failure."""
    for name, fails, last in (("board_f", 0, "failed in close()"), ("board_g", 2, "failed at step 2, in step()")):
        environment(tmp_path, name, fails)
        file = tmp_path / f"{name}.py"
        method = "    def close(self):\n        raise ValueError('\\x1b[2J')\n\n    def step("
        file.write_text(file.read_text().replace("    def step(", method))
        assert main(["try", f"{name}:{name}-v0", "--python-path", str(tmp_path)]) == 1
        err = capsys.readouterr().err
        assert err.endswith(f"sparring try: {name}:{name}-v0 {last}\n")
        assert "tryout.py" not in err
        assert "\x1b" not in err


@pytest.mark.parametrize(
    ("how", "shown"),
    [
        ("raise StopIteration('over')", "StopIteration: over ("),
        ("raise GeneratorExit", "GeneratorExit ("),
        ("raise BrokenPipeError('of its game')", "BrokenPipeError: of its game ("),
        (r"raise ValueError('\x1b[2J')", r"ValueError: \x1b[2J ("),
        ("__import__('sys').stderr = None; 1 / 0", "ZeroDivisionError: division by zero ("),
    ],
)
def test_whatever_an_environment_raises_is_shown_as_text_without_frames_of_others(
    how: str, shown: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"board_r{abs(hash(how))}"
    environment(tmp_path, name, fails=2, how=how)
    stream = open(2, "w", closefd=False)  # noqa: SIM115 (as long as the test)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("sys.__stderr__", stream)
    assert main(["try", f"{name}:{name}-v0", "--python-path", str(tmp_path)]) == 1
    err = capfd.readouterr().err
    *_, failed, last = err.splitlines()
    assert failed.startswith(shown)
    assert last == f"sparring try: {name}:{name}-v0 failed at step 2, in step()"
    assert "tryout.py" not in err


def test_call_that_does_not_return_is_named_with_the_line_where_it_hangs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(tryout.os, "_exit", ended.append)
    trial, hangs, released = tryout.Trial("goal", 1, {}, 0), threading.Event(), threading.Event()
    work = lambda: (hangs.set(), released.wait())  # noqa: E731 (its line is that of the call)
    line = work.__code__.co_firstlineno
    thread = threading.Thread(target=work)
    thread.start()
    hangs.wait()
    trial.calls("at step 7, in step()")
    tryout._end_where_it_hangs(trial, 0.0, thread.ident or 0, children())
    released.set()
    thread.join()
    assert ended == [1]
    assert f"got no answer within 0 s from goal at step 7, in step() ({__file__}:{line}); " in capsys.readouterr().err
    trial.close()
    tryout._end_where_it_hangs(trial, 60.0, 0, ())
    assert ended == [1], "a trial that has ended hangs no more"


def test_syntax_error_of_an_environment_is_shown_without_frames(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "board_d.py").write_text("def f(:\n")
    assert main(["try", "board_d", "--python-path", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f'  File "{tmp_path / "board_d.py"}", line 1\n')
    assert re.search(rf"^SyntaxError: .* \({tmp_path / 'board_d.py'}:1\)$", err, re.MULTILINE), "check shows this line"


def test_output_that_cannot_be_written_is_not_the_failure_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.stdout, "write", full)
    assert main(["try", "goal", "--steps", "1"]) == 1
    said = "got [Errno 28] No space left on device; expected an output that can be written; mend it"
    assert capsys.readouterr().err == f"sparring: {said}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot tell")
@pytest.mark.parametrize("command", ["try", "check"])
def test_processes_that_an_environment_leaves_are_ended(tmp_path: Path, command: str) -> None:
    """They may hold the output of the command, and have left their own parent."""
    environment(tmp_path, "board_s")
    with (tmp_path / "board_s.py").open("a") as module:
        module.write("__import__('subprocess').run(['sh', '-c', 'sleep 987 & echo $! > left'])\n")
    file = tmp_path / "board.yaml"
    file.write_text(
        "behaviors: {A: }\nsimulators: [{name: gymnasium, options: {env_id: 'board_s:board_s-v0', behavior: A}}]\n"
        f"pipeline: {{python_path: [{tmp_path}]}}\n"
    )
    words = [command, str(file), *(["--steps", "1"] if command == "try" else [])]
    done = subprocess.run(
        [sys.executable, "-m", "sparring", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert re.search("ended what was left running: (sleep|sh)\n", done.stdout + done.stderr), "sh before it is sleep"
    assert not psutil.pid_exists(int((tmp_path / "left").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot tell")
def test_processes_that_an_environment_leaves_are_ended_by_a_signal(tmp_path: Path) -> None:
    environment(tmp_path, "board_t")
    with (tmp_path / "board_t.py").open("a") as module:
        module.write("__import__('subprocess').run(['sh', '-c', 'setsid sleep 987 & echo $! > left'])\n")
    words = [sys.executable, "-m", "sparring", "try", "board_t:board_t-v0", "--steps", str(10**9)]
    trying = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "left").exists() or not (tmp_path / "left").read_text():
        time.sleep(0.01)
    trying.terminate()
    _, said = trying.communicate(timeout=60)
    assert trying.returncode == 130, said
    assert not psutil.pid_exists(int((tmp_path / "left").read_text()))


SUSPECT = """
import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv


class Suspect(AECEnv):
    metadata = {"name": "suspect"}
    possible_agents = ["a", "b"]

    def observation_space(self, agent):
        return spaces.Box(0, 255, (3, 40, 40), np.uint8)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.agent_selection, self.turns = ["a", "b"], "a", 0
        self.rewards, self._cumulative_rewards = dict.fromkeys("ab", 0.0), dict.fromkeys("ab", 0.0)
        self.terminations, self.truncations = dict.fromkeys("ab", False), dict.fromkeys("ab", False)
        self.infos = {"a": {}, "b": {}}

    def observe(self, agent):
        return np.ones((3, 40, 40), np.uint8)

    def step(self, action):
        if self.terminations[self.agent_selection]:
            return self._was_dead_step(action)
        self.turns += 1
        if self.turns == 5:
            self.terminations = dict.fromkeys(self.agents, True)


def env():
    return Suspect()
"""


def test_what_looks_like_a_mistake_and_breaks_no_rule_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "suspect_env.py").write_text(SUSPECT)
    assert main(["try", "suspect_env", "--option", "teams=each", "--python-path", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    notices = [line for line in shown.out.splitlines() if line.startswith("  notice: ")]
    assert [" ".join(line.split()[1:5]) for line in notices] == [
        "observation was the same",
        "no agent of suspect_env?team=1",
        "every reward was 0;",
    ]
    assert "the image 'observation' has values up to 1: bytes are divided by 255" in shown.err


SHORT = """
import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv

NAMES = ["a_0", "a_1", "b_0", "b_1"]


class Spaces:
    metadata = {"name": "short"}
    possible_agents = NAMES
    render_mode = None

    def observation_space(self, agent):
        return spaces.Box(0, 1, (2,))

    def action_space(self, agent):
        return spaces.Discrete(2)

    def observe(self, agent):
        return np.random.random(2).astype(np.float32)


class InTurns(Spaces, AECEnv):
    def reset(self, seed=None, options=None):
        self.agents, self.moves, self.agent_selection = NAMES[:], 0, NAMES[0]
        self.rewards, self._cumulative_rewards = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0)
        self.terminations, self.truncations = dict.fromkeys(NAMES, False), dict.fromkeys(NAMES, False)
        self.infos = {name: {} for name in NAMES}

    def step(self, action):
        if self.terminations[self.agent_selection]:
            return self._was_dead_step(action)
        self.moves += 1
        self.agent_selection = NAMES[self.moves % 4]
        if self.moves == 7:
            self.terminations = dict.fromkeys(NAMES, True)


class AtOnce(Spaces, ParallelEnv):
    def reset(self, seed=None, options=None):
        self.agents = NAMES[:]
        return {name: self.observe(name) for name in NAMES}, {name: {} for name in NAMES}

    def step(self, actions):
        self.agents = []
        seen, same = {name: self.observe(name) for name in NAMES}, dict.fromkeys(NAMES, 0)
        return seen, same, dict.fromkeys(NAMES, True), dict.fromkeys(NAMES, False), {name: {} for name in NAMES}
"""


@pytest.mark.parametrize(
    ("made", "noted"),
    [
        (("env", "InTurns"), ["every reward was 0; step() of a game in turns ends with self._accumulate_rewards()"]),
        (
            ("parallel_env", "AtOnce"),
            [
                "every reward was 0",
                "episodes are very short; does reset(), or step() of a vector form, begin a new one?",
            ],
        ),
    ],
)
def test_few_moves_of_each_agent_make_a_match_in_turns(
    made: tuple[str, str], noted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"short_{made[0]}"
    (tmp_path / f"{module}.py").write_text(f"{SHORT}\n\ndef {made[0]}():\n    return {made[1]}()\n")
    assert main(["try", module, "--option", "teams=per_type", "--python-path", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.removeprefix("  notice: ") for line in lines if "notice" in line] == noted


STALE = """
import gymnasium
import numpy as np
from gymnasium import spaces


class Stale(gymnasium.Env):
    observation_space, action_space = spaces.Dict(a=spaces.Box(0, 1, (2,))), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seen = {"a": self.np_random.random(2), "b": 1}
        self.left = 5
        return self.seen, {}

    def step(self, action):
        self.left -= 1
        return self.seen, 1e6, not self.left, False, {}


gymnasium.register("Stale-v0", Stale)
"""


def test_observations_that_never_change_in_an_episode_large_rewards_and_unread_entries_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stale_env.py").write_text(STALE)
    assert main(["try", "stale_env:Stale-v0", "--python-path", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "  notice: Stale?team=0 observed the same in each step of an episode" in out
    assert "  notice: rewards are up to 1e+06; set reward_signals.extrinsic.normalize: true" in out
    assert err == "notice: the observation_space lacks b, which are not read\n"
    assert "has ended twice" not in out


def test_environment_whose_episodes_end_once_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = STALE.replace("self.left = 5", "self.left = getattr(self, 'left', 5)").replace("stale", "once")
    (tmp_path / "once_env.py").write_text(text.replace("Stale", "Once"))
    assert main(["try", "once_env:Once-v0", "--python-path", str(tmp_path)]) == 0
    assert "notice: no agent has ended twice, though first episodes were short; does reset()" in capsys.readouterr().out


CONFIGURATION = """
behaviors: {board_c: {max_steps: 100}}
simulators: [{name: gymnasium, options: {env_id: "board_c:board_c-v0"%s}}]
"""

MATCH3 = "network_settings: {vis_encode_type: match3}"  # for images of 6 x 7


def test_check_shows_what_is_read_and_refuses_what_cannot_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The environment runs in a process of its own, beside the configuration."""
    file = tmp_path / "board.yaml"
    file.write_text((CONFIGURATION % ", images: observation").replace("max_steps: 100", MATCH3))
    assert main(["check", str(file)]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{file}: it cannot run here\n")
    assert f"not usable: {file}:3: simulators[0].options.env_id: got environment" in out
    assert "No module named 'board_c'" in out
    environment(tmp_path, "board_c")
    assert main(["check", str(file)]) == 0
    assert "  board_c?team=0: agents 1; observations observation: image 2 x 6 x 7" in capsys.readouterr().out
    for wrong, explained in (
        (("{board_c:", "{broad_c:"), "got behavior 'board_c?team=0'; expected one of ['broad_c']"),
        (("max_steps: 100", "network_settings: {vis_encode_type: resnet}"), "got image 'observation' of 6 x 7 pixels"),
        (("simulators:", "pipeline: {limits: {observation_bytes: 99}}\nsimulators:"), "got observations of 336 bytes"),
    ):
        file.write_text((CONFIGURATION % ", images: observation").replace(*wrong))
        assert main(["try", str(file), "--steps", "0"]) == 1
        assert explained in capsys.readouterr().err
    file.write_text((CONFIGURATION % "").replace("{board_c:", "{broad_c:"))
    assert main(["check", str(file)]) == 1
    assert f"not usable: {file}:2: behaviors: got behavior 'board_c?team=0'" in capsys.readouterr().out
    assert main(["check", str(file), "--set", "simulators[0].options.images=cam"]) == 1
    assert (
        "not usable: command line: simulators[0].options.images: got images 'cam'; expected" in capsys.readouterr().out
    )
    (tmp_path / "board_h.py").write_text("import os\n\nos._exit(0)\n")
    file.write_text((CONFIGURATION % "").replace("board_c", "board_h"))
    assert main(["check", str(file)]) == 1
    assert "its process ended without a word (exit status 0)" in capsys.readouterr().out
    file.write_text(CONFIGURATION % "")
    assert main(["check", str(file)]) == 0
    assert "warning: observation 'observation', a box of (6, 7, 2) int8, is read" in capsys.readouterr().out


def test_wrappers_are_a_list_in_a_configuration() -> None:
    """Other options are single values."""
    text = "behaviors: {A: {}}\nsimulators: [{name: pettingzoo, options: {env_id: a, %s}}]"
    wrappers = "wrappers: [{class: a.B, stack_size: 4}, c.D]"
    (one,) = parse_settings(text % wrappers, "a.yaml").settings.simulators
    assert one.options["wrappers"] == '[{"class": "a.B", "stack_size": 4}, "c.D"]'
    with pytest.raises(Exception, match="got a list or mapping for the option teams"):
        parse_settings(text % "teams: [each]", "a.yaml")


# ---------------------------------------------------------------- self-play without opponents


def test_video_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    settings = parse_settings("behaviors: {A: }\nsimulators: [{name: gymnasium, options: {env_id: a}}]\n", "a.yaml")
    (tmp_path / "video.gif").mkdir()
    with pytest.raises(SettingsError, match=r"video.gif, which is a folder"):
        evaluate._rendered(settings.settings, tmp_path / "video.gif")


@pytest.mark.parametrize(
    ("simulator", "refused"),
    [
        ("{name: gymnasium, options: {env_id: CartPole-v1}}", "a Gymnasium environment"),
        ("{name: pettingzoo, options: {env_id: a}}", "a PettingZoo environment without teams"),
        ("{name: pettingzoo, options: {env_id: a, teams: shared}}", "a PettingZoo environment without teams"),
        ("{name: pettingzoo, options: {env_id: a, teams: each}}", ""),
        ("{name: pettingzoo, options: {env_id: a}}, {name: pettingzoo, options: {env_id: a, teams: each}}", ""),
        ("{name: soccer, options: {rivals: scripted}}", ""),
        ("{name: gymnasium, options: {env_id: CartPole-v1}}, {command: [./game]}", ""),
    ],
)
@pytest.mark.parametrize("section", ["behaviors: {A: {self_play: {}}}", "default_settings: {self_play: {}}"])
def test_self_play_where_all_environments_have_one_team_is_refused(simulator: str, refused: str, section: str) -> None:
    text = f"{section}\nsimulators: [{simulator}]"
    if not refused:
        parse_settings(text, "a.yaml")
        return
    expected = f"a.yaml:1: .*self_play: got self_play with {refused}.*write teams: each, or per_type, in the options"
    with pytest.raises(Exception, match=expected):
        parse_settings(text, "a.yaml")


def test_video_of_a_game_that_does_not_render_is_refused(tmp_path: Path, capsys: Any) -> None:
    from tests.services.test_services_evaluation import untrained

    assert main(["evaluate", str(untrained(tmp_path)), "--video", "a.gif"]) == 2
    assert "got --video a.gif of a run with goal; expected a file .gif of a Gymnasium" in capsys.readouterr().err


def test_number_of_a_simulator_that_is_not_there_is_refused(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.yaml").write_text("behaviors: {Goal: {}}\nsimulators: [{name: goal}]")
    assert main(["try", str(tmp_path / "a.yaml"), "--simulator", "7"]) == 2
    assert "got --simulator 7; expected a number from 0, below 1" in capsys.readouterr().err


def test_what_an_environment_of_one_team_without_a_picture_cannot_do_is_refused(tmp_path: Path, capsys: Any) -> None:
    """It is refused before anything is started, or loaded: the run has no checkpoint."""
    text = "behaviors: {CartPole: {}}\nsimulators: [{name: gymnasium, options: {env_id: CartPole-v1}}]"
    folder = tmp_path / "run"
    folder.mkdir()
    build(parse_settings(text, "test").settings, run_id="run", directory=folder, seed=3).save()
    assert main(["tournament", str(folder), "--untrained"]) == 2
    assert "got a tournament in a Gymnasium environment, whose agents are all in team 0" in capsys.readouterr().err
    assert main(["evaluate", str(folder), "--video", str(tmp_path / "none" / "a.gif")]) == 2
    assert f"expected a folder that exists; make {tmp_path / 'none'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "place", "refused"),
    [
        (
            "network_settings: {encoders: {gaol: fully_connected}}",
            "2: behaviors.Goal.network_settings.encoders",
            "encoders for ['gaol'] in behavior Goal; expected",
        ),
        (
            "self_play: {opponents: [{scripted: expert}]}",
            "2: behaviors.Goal.self_play.opponents",
            "got behavior Goal with scripts []; expected ['expert'] too",
        ),
    ],
)
def test_what_a_run_would_refuse_of_a_simulator_is_refused_at_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: str, place: str, refused: str
) -> None:
    file = tmp_path / "goal.yaml"
    file.write_text(f"behaviors:\n  Goal: {{{settings}}}\nsimulators: [{{name: goal}}]\n")
    assert main(["check", str(file)]) == 1
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("not usable: ")]
    assert line.startswith(f"not usable: {file}:{place}")
    assert refused in line
