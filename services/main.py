"""The `sparring` command, which imports only the module of the chosen command: a simulator loads no torch."""

import argparse
import contextlib
import errno
import importlib
import io
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Collection, Sequence
from typing import Final, NoReturn

from sparring import __version__
from sparring.pipeline.errors import BAD_INPUT, FAILED, NOTICE, SettingsError, SparringError, first_failure
from sparring.pipeline.files import working_folder
from sparring.services.process import interrupts
from sparring.services.process.lifeline import end_strays, end_with_supervisor

COMMANDS: Final = {
    "train": "train from a configuration",
    "evaluate": "play episodes with a checkpoint and measure it",
    "sweep": "search settings by many runs",
    "export": "write trained policies to files for games and other programs",
    "record": "record episodes of a simulator as demonstrations",
    "demo": "show the content of recorded episodes",
    "tournament": "let trained policies play against each other",
    "check": "check a configuration without running it",
    "try": "show what an environment is read as, and play random steps in it",
    "keys": "make keys for simulators on other machines",
    "status": "show the state of a run",
    "page": "show runs in a browser",
    "doctor": "show what this machine lacks for a run",
    "simulator": "run a built-in simulator or a bridge",
    "service": "run one service of a run alone",
    "writer": "run one writer of a run alone",
    "compliance": "check a foreign simulator against the protocol",
}


_LIMITED: Final = errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EFBIG
_LEFTOVERS_S: Final = 5.0
_THREAD_S: Final = 0.5
_EXIT_S: Final = 10.0
"""Time for what plug-ins have registered to run at the exit."""
_FORKING: Final = {"train", "evaluate", "tournament"}
"""Commands that start services."""
_PLUGGED: Final = _FORKING | {"check", "export", "record", "simulator", "try"}
"""Commands that load plug-ins or environments in their own process."""
_MODULES: Final = {
    "simulator": "sparring.services.stages.simulator",
    "sweep": "sparring.services.sweeps.command",
    "try": "sparring.services.commands.tryout",
}
"""Modules of commands that are also stages of a run, use the Python interface, or whose name is a keyword."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors take one line, with the known word that is most like an unknown one."""

    given: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """Ends the process, with status 2."""
        from sparring.pipeline.errors import did_you_mean  # pydantic

        choice = re.fullmatch(r".*invalid choice: '(.*)' \(choose from (.*)\)", message, re.DOTALL)
        known = re.findall(r"[\w-]+", choice[2]) if choice else self._option_string_actions
        words = [choice[1]] if choice else [word.partition("=")[0] for word in self.given if word.startswith("--")]
        hints = [hint for word in words if word not in known and (hint := did_you_mean(word, known))]
        self.exit(BAD_INPUT, "; ".join([f"{self.prog}: {message}", *hints, f"see {self.prog} --help\n"]))


def module_of(command: str) -> str:
    """Returns the name of the module of a command."""
    return _MODULES.get(command, f"sparring.services.commands.{command}")


def _open_standard_streams() -> None:
    """Opens the null device for standard streams that are closed; the next files would get their descriptors."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115
    with contextlib.suppress(OSError):  # where something else has become its file since it was opened
        if isinstance(sys.stdout, io.TextIOWrapper):  # the locale may lack letters of a path
            sys.stdout.reconfigure(errors="backslashreplace")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status: 0 success, 1 failure, 2 bad input."""
    _open_standard_streams()
    is_supervised = end_with_supervisor()  # before the imports, during which it may end
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _check_working_folder(is_supervised=is_supervised)
        _check_encoding(given)
        status = _run(given)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # what has read the output has ended, as `head` does
        _leave_output()
        return 128 + signal.SIGPIPE
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as failure:  # which those of libraries in Rust are
        # A library may have made an error of its own of an interrupt during the start.
        if interrupts.has_come() and "KeyboardInterrupt" in "".join(traceback.format_exception(failure)):
            return 128 + signal.SIGINT
        return _report(failure, is_logged=is_supervised)


def _leave_output() -> None:
    """Lets the exit of this process write nothing to an output that takes nothing."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in its buffer


def end_leftovers(status: int, spared: Collection[int]) -> None:
    """Ends what plug-ins have left in this process: its children, and threads and functions that exit waits for.

    Args:
        status: with which this process exits.
        spared: children that stay.
    """
    if not _PLUGGED.intersection(sys.argv[1:2]):
        return
    if (forking := sys.modules.get("sparring.services.process.forking")) is not None:
        forking.end()
    left = end_strays(spared, _LEFTOVERS_S)
    threads = [one for one in threading.enumerate() if one is not threading.main_thread() and not one.daemon]
    for one in threads:
        one.join(_THREAD_S)
    alive = [one.name for one in threads if one.is_alive()]
    if left or alive:
        sys.stderr.write(f"{NOTICE}ended what was left running: {', '.join([*left, *alive])}\n")
    if alive:
        _end(status)
    threading.Thread(target=_end_late, args=(status, spared), daemon=True).start()


def _end_late(status: int, spared: Collection[int]) -> None:
    """Ends this process where it has not ended in time, and all that it has started."""
    time.sleep(_EXIT_S)
    sys.stderr.write(f"{NOTICE}ended what plug-ins run at the exit, which took more than {_EXIT_S:g} s\n")
    import psutil  # which no command waits for at its start

    left = list[psutil.Process]()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            left += [child, *child.children(recursive=True)] if child.pid not in spared else []
    for one in reversed(left):  # this process may end with the first
        with contextlib.suppress(psutil.Error):
            one.kill()
    _end(status)


def _end(status: int) -> None:
    """Ends this process without its exit handlers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _check_working_folder(*, is_supervised: bool) -> None:
    """Raises SettingsError where the working folder is gone; a part of a run that began in it leaves it.

    No library can be loaded there.
    """
    try:
        working_folder()
    except SettingsError:
        if not is_supervised:
            raise
        os.chdir("/")


def _check_encoding(given: Sequence[str]) -> None:
    """Raises SettingsError where the working folder or an argument is no UTF-8, as the files of a run are."""
    for what, words in (("working folder", [str(working_folder())]), ("argument", given)):
        for word in words:
            try:
                word.encode()
            except UnicodeEncodeError:
                raise SettingsError(f"got the {what} {word!r}; expected text in UTF-8; rename it") from None


def _run(given: Sequence[str]) -> int:
    Parser.given = given
    parser = Parser(prog="sparring", description="Trains teams of agents in simulators of your own.")
    parser.add_argument("--version", action="version", version=f"sparring {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in given if not word.startswith("-")), "")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name == chosen:
            alone = not {"--in-process", "--offline"}.isdisjoint(given)
            if name in _FORKING and not alone and sys.platform == "linux":
                from sparring.services.process import forking

                forking.server()  # its imports take longer than all that is done here until the first service starts
            module = importlib.import_module(module_of(name))
            module.add_arguments(command)
            command.set_defaults(handler=module.run)
    args, unknown = parser.parse_known_args(given)
    if unknown:
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return int(args.handler(args))
    except SystemExit as left:  # by an environment or a plug-in, which would leave no trace
        from sparring.pipeline.bridges.explain import described_with_place

        got = described_with_place(left)
        raise SparringError(f"got {got}; expected code that returns, or raises an error; correct it") from left


def _is_limit(error: BaseException) -> bool:
    """Returns whether the system has refused memory, a file or a thread."""
    refused = isinstance(error, OSError) and error.errno in _LIMITED
    return refused or isinstance(error, MemoryError) or "can't start new thread" in str(error)


def _report(failure: BaseException, *, is_logged: bool) -> int:
    """Prints what went wrong, which may hold words of a simulator; returns the exit status.

    Args:
        failure: what has ended the command.
        is_logged: standard error is a log, for whole tracebacks.

    Raises:
        BaseException: the failure, where it is a mistake in sparring, and this is the place for its traceback.
    """
    from sparring.pipeline.monitoring.logs import printable  # structlog

    error = first_failure(failure)
    if _is_limit(error):
        got = str(error) or "no memory"
        text = f"got {got}; expected what a run needs; raise the limits of this process (`ulimit -a`)"
    elif isinstance(error, OSError):  # of a disk, or of the terminal, the pipe or the socket that takes the output
        text = f"got {error}; expected paths and outputs that are valid, have room and can be written; mend it"
    elif isinstance(error, SparringError):
        text = str(error)
    elif is_logged:
        raise failure
    else:
        text = _mistake(failure)
    sys.stderr.write(f"sparring: {printable(text)}\n")
    _leave_output()
    return BAD_INPUT if isinstance(error, SettingsError) else FAILED


def _mistake(failure: BaseException) -> str:
    """Returns the text about a failure of no known kind, and writes its traceback to a file.

    Raises:
        BaseException: the failure, where no file can be written.
    """
    from sparring.pipeline.bridges.explain import described_with_place

    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="sparring-traceback-", suffix=".txt", delete=False, errors="backslashreplace"
        ) as file:
            traceback.print_exception(failure, file=file)
    except OSError:
        raise failure from None
    got = described_with_place(first_failure(failure))
    return f"got {got}; expected none: it is a mistake in sparring, or in a plug-in; report it with {file.name}"
