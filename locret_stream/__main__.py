"""The `locret-stream` command, and `python -m locret_stream`. It imports nothing before it handles Ctrl-C."""

import contextlib
import os
import sys
import threading

SPINS = "5000"  # a sixtieth of libgomp's own number, which is milliseconds, some hundred times a token


def main() -> None:
    """Run the command line. Ctrl-C while it is imported ends the process as quietly as later."""
    # At the end of each operation torch's threads wait for each other (libgomp, which reads this as torch is loaded).
    # Where other processes use the cores, too, the one that is waited for does not run, and the others take its time.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    try:
        from locret_stream.cli import app
        from locret_stream.cli.errors import INTERRUPTED, STOPPED
    except KeyboardInterrupt:
        print("\nInterrupted: nothing was fed yet.", file=sys.stderr)
        sys.exit(130)
    try:
        app(args=sys.argv[1:], prog_name="locret-stream")
    except SystemExit as end:
        if end.code in (INTERRUPTED, *STOPPED.values()):
            _leave(end.code)
        raise


def _leave(status: int) -> None:
    """End the process here if a thread that loads or computes still runs: a thread that is inside torch while the
    interpreter shuts down would abort the process. All that was acknowledged is durable by now."""
    if any(thread.daemon for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the terminal may be closed
                stream.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
