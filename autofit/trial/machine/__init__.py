"""The machine under a trial: its instruction sets, its state while the trial is timed, and the lock on its devices."""
