"""``python -m ms_kungfu.doctor``: report what is installed, what would be used, and remedies for problems."""
