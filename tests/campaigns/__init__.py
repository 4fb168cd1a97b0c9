"""Random campaigns, sweeps and soaks, run by hand: ``python -m tests.campaigns``."""
