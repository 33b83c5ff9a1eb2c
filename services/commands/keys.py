"""Makes the keys for simulators on other machines: `sparring keys DIR`.

consumes      nothing
produces      a folder that `docs/security.md` describes
waits for     nothing
unblocked by  nothing
"""

import argparse
import sys
from pathlib import Path
from typing import Final

from sparring.pipeline.errors import SettingsError

_DIGITS: Final = 4
"""Of the largest number of simulators that get keys at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of `sparring keys`."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="folder for the keys: new, unless --add is given")
    parser.add_argument("--simulators", nargs="+", default=[], metavar="NAME", help="their names, or how many (none)")
    parser.add_argument("--hosts", default="", metavar="HOST,...", help="names or addresses of the run beside loopback")
    parser.add_argument("--add", action="store_true", help="more simulators for the keys that are there")


def run(args: argparse.Namespace) -> int:
    """Makes the keys.

    Raises:
        SettingsError: the folder exists, a name is invalid, or the extra `keys` is not installed.
    """
    try:
        from sparring.pipeline.security import making
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"got no module {error.name}; expected the extras train and keys; "
            "install them with `pip install '.[train,keys]'`"
        ) from None
    hosts = [host.strip() for host in args.hosts.split(",") if host.strip()]
    simulators = args.simulators
    if len(simulators) == 1 and simulators[0].isdecimal():
        if len(simulators[0]) > _DIGITS:
            expected = f"at most {10**_DIGITS - 1}, each of which takes a certificate"
            raise SettingsError(f"got --simulators {simulators[0]:.20}; expected {expected}; make fewer")
        simulators = making.numbered(int(simulators[0]), args.directory if args.add else None)
    if args.add:
        if hosts:
            raise SettingsError("got --add with --hosts; expected new simulators only; make new keys for other hosts")
        making.add(args.directory, simulators)
    else:
        making.make(args.directory, simulators, hosts)
    names = f": {', '.join(simulators)}" if simulators else ""
    sys.stdout.write(f"{args.directory}: keys for {len(simulators)} simulators{names}\n")
    return 0
