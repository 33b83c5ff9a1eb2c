"""`sparring page [RESULTS]`: shows runs in a browser, those under way and those that have ended."""

import argparse
import contextlib
import importlib.util
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

from sparring.pipeline.errors import SettingsError, install_command
from sparring.pipeline.queues.endpoints import is_loopback
from sparring.pipeline.security import server_tls, token
from sparring.services.commands.runs import RESULTS
from sparring.services.process.encryption import KEYS_VARIABLE
from sparring.services.process.hosting import SPARRING
from sparring.services.process.lifeline import ending_with_caller

_HOST: Final = "127.0.0.1"
_PORT: Final = 6100
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_NICENESS: Final = 15
"""A page that is looked at takes no core from training."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    shown = "folder with runs, or one run (default: %(default)s)"
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS, metavar="RESULTS", help=shown)
    where = f"where it listens (default: {_HOST}:{_PORT}, or a free port where that is in use); elsewhere it needs keys"
    parser.add_argument("--address", default="", metavar="HOST[:PORT]", help=where)
    parser.add_argument("--host", action="append", default=[], help="further name of this machine in a browser; repeat")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="folder of keys, for TLS and a token ($SPARRING_KEYS)")
    parser.add_argument("--run", default="", metavar="RUN", help="print the address of this run")


def run(args: argparse.Namespace) -> int:
    """Answers browsers until it is stopped; returns 0.

    Raises:
        SettingsError: the extra `page` or a key is missing, or the address cannot be used.
    """
    _check_installed()
    from sparring.services.page.runs import Runs
    from sparring.services.page.server import Page, listening, page_token, serve

    if not args.results.is_dir():
        raise SettingsError(
            f"got {args.results}, which is no folder; expected one with runs; train one, or name another"
        )
    host, port = _address(args.address)
    shown, tls = _protection(host, args.keys)
    try:
        listener = listening(host, port, _PORT)
    except OSError as error:
        got = f"{args.address or host} as address of the page ({error.strerror})"
        raise SettingsError(f"got {got}; expected one that is free; choose another") from error
    hosts = [host, socket.gethostname(), *args.host, *_LOOPBACK]
    named = args.host[0] if args.host else socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104
    secret = page_token(shown) if shown else ""
    address = f"http{'s' if tls else ''}://{f'[{named}]' if ':' in named else named}:{listener.getsockname()[1]}/"
    address += f"?token={secret}" if secret else f"#/run/{quote(args.run, safe='')}" if args.run else ""
    sys.stdout.write(f"page  {address}\n")
    sys.stdout.flush()
    os.nice(_NICENESS)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn ends in order, and then raises it again
    with contextlib.suppress(KeyboardInterrupt):
        serve(Page(Runs(args.results.absolute())), listener, hosts, secret, tls)
    return 0


def _check_installed() -> None:
    """Refuses to go on without the libraries of the page.

    Raises:
        SettingsError: one is not installed.
    """
    for name in ("sse_starlette", "starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            remedy = install_command("page")
            raise SettingsError(f"got no module {name}; expected the extra page; install it with `{remedy}`")


def _address(text: str) -> tuple[str, int | None]:
    """Returns host and port of an address; None where it has no port.

    Raises:
        SettingsError: it is none.
    """
    try:
        parts = urlsplit(f"//{text}")
        if parts.path or parts.username is not None:
            raise ValueError(text)
        host = parts.hostname or _HOST
        host.encode("idna")  # UnicodeError: it is no name of a host
        return host, parts.port
    except ValueError:
        raise SettingsError(
            f"got {text!r} as address of the page; expected HOST:PORT, as 127.0.0.1:{_PORT}; correct it"
        ) from None


def _protection(host: str, keys: Path | None) -> tuple[str, ssl.SSLContext | None]:
    """Returns the token of the folder of keys, and the context of TLS; neither on loopback without keys.

    Raises:
        SettingsError: other machines could reach it, and there are no keys, or they cannot be used.
    """
    folder = keys or (Path(named) if (named := os.environ.get(KEYS_VARIABLE)) and not is_loopback(host) else None)
    if folder is not None:
        context = server_tls(folder)
        context.verify_mode = ssl.CERT_NONE  # the token is asked for; a browser has no certificate
        return token(folder), context
    if not is_loopback(host):
        raise SettingsError(
            f"got address {host} of the page, which others can reach, without keys; expected keys, or loopback; "
            "make keys with `sparring keys DIR` and pass --keys DIR, or use loopback and an SSH tunnel"
        )
    return "", None


@contextlib.contextmanager
def page_beside(address: str | None, directory: Path, keys: Path | None) -> Iterator[None]:
    """Shows a run meanwhile, in a process of its own, whose end does not matter to the run; None shows nothing.

    Args:
        address: as `--address`.
        directory: of the run.
        keys: folder of keys.

    Raises:
        SettingsError: the extra `page` is missing, or the address is none, or needs keys. One in use is refused later.
    """
    if address is None:
        yield
        return
    _check_installed()
    _protection(_address(address)[0], keys if address else None)
    words = [str(directory.parent), "--run", directory.name, "--address", address]
    words += ["--keys", str(keys)] if keys is not None and address else []
    with ending_with_caller() as options:
        process = subprocess.Popen([*SPARRING, "page", *words], stdin=subprocess.DEVNULL, **options)
        try:
            yield
        finally:
            process.kill()  # it only reads
            process.wait()
