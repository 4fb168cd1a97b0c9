"""``python -m ms_kungfu.doctor``: what is installed, what would be used, and what to do about the rest."""
