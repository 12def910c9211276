"""`python -m locret_stream.cli` is the same command."""

from locret_stream.cli import main

main()
