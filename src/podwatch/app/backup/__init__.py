"""How the daemon keeps the run in the store: who may write, what is sent next, what is published, kept and reported."""
