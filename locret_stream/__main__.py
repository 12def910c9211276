"""The `locret-stream` command, and `python -m locret_stream`: as little as can stand before Ctrl-C is answered."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C before it is even imported ends as quietly as later."""
    try:
        from locret_stream.cli import app
    except KeyboardInterrupt:
        print("\nInterrupted: nothing was fed yet.", file=sys.stderr)
        sys.exit(130)
    app(args=sys.argv[1:], prog_name="locret-stream")


if __name__ == "__main__":
    main()
