"""`sparring` and `python -m sparring` are the same command."""

import sys


def main() -> int:
    """Runs the command; an interrupt that it does not handle, as one during its imports, ends it with status 130."""
    try:
        from sparring.services.process import interrupts

        interrupts.watch()
        from sparring.services.main import main as run_command

        return run_command()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
