"""How the command line ends when it fails: one line on stderr and an exit status, never a traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from locret_stream.cli.output import make_printable
from locret_stream.errors import LocretError, SourceError

MISTAKE, INTERRUPTED = 2, 130
STOPPED = {"SIGTERM": 143, "SIGHUP": 129}  # exit statuses for the signals of `kill`, service managers, closed terminals


class OneLineGroup(TyperGroup):
    """Every mistake of the user ends in one line on stderr and exit status 2."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, complete_var: str | None = None,
             standalone_mode: bool = True, windows_expand_args: bool = True, **extra: Any) -> Any:
        args = list(sys.argv[1:] if args is None else args) or ["--help"]
        make_printable()
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
            if code == INTERRUPTED:  # Ctrl-C before or after the verb's own `interruptible`
                print("\nInterrupted.", file=sys.stderr)
        except typer.TyperException as error:
            if not error.format_message():  # no arguments were given, and the help was printed
                raise SystemExit(0) from None
            fail(error.format_message(), error.exit_code)
        except LocretError as error:
            fail(explain(error))
        except BrokenPipeError:
            _discard_stdout()
            raise SystemExit(1) from None
        except OSError as error:
            if error.filename is None:
                if error.errno not in (errno.ENOSPC, errno.EIO, errno.EFBIG):
                    raise
                _discard_stdout()  # stdout or stderr cannot be written: errors of stores and readers name a file
            fail(f"{error.filename or 'the output cannot be written'}: {error.strerror or error}")
        except typer.Abort:
            fail("aborted", 1)
        if standalone_mode:
            raise SystemExit(code if isinstance(code, int) else 0)
        return code


def _discard_stdout() -> None:
    """Send what stdout still buffers to nowhere, so that the flush at exit raises nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def explain(error: BaseException) -> str:
    """The message of an error; where a source failed for a reason that has a message of its own, that message."""
    if isinstance(error, SourceError) and isinstance(error.__cause__, (LocretError, OSError)):
        cause = error.__cause__
        return f"{cause.filename}: {cause.strerror}" if isinstance(cause, OSError) and cause.filename else str(cause)
    return str(error)


def fail(message: str, code: int = MISTAKE) -> NoReturn:
    """Print the message as one line on stderr and exit."""
    print("locret-stream:", " ".join(message.split()), file=sys.stderr)
    raise SystemExit(code)
