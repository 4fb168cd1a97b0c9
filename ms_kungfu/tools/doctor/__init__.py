"""``python -m ms_kungfu.doctor``: report what is installed, what a job would use, and remedies for problems."""
