"""The lease: which pod may publish for a run. Held in the store, judged in policy/who_holds_the_run.py."""
