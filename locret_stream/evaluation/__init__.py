"""Tasks, runs and reports: how well a bounded memory remembers."""
