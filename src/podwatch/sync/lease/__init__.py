"""The lease: which pod may publish for a run. Held in the store, judged in policy/who_may_publish.py."""
