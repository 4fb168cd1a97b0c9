"""``python -m ms_kungfu.doctor``: report what is installed, what would be used, and the remedies for the rest."""
