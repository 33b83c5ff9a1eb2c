"""`sparring` and `python -m sparring` are the same command."""

import sys


def main() -> int:
    """Runs the command; an interrupt that it does not handle, as one during its imports, ends it with status 130."""
    try:
        from sparring.services.process import interrupts

        interrupts.watch()
        try:
            from sparring.services.main import end_leftovers
            from sparring.services.main import main as run_command
            from sparring.services.process.lifeline import children

            given = children()  # of the shell script that this process was, as in `tensorboard ... & exec sparring ...`
            status = run_command()
            end_leftovers(status, given)
            return status
        finally:
            interrupts.leave()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
