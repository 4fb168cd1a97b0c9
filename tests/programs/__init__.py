"""Programs as people have them: ``python -m tests.programs``."""
