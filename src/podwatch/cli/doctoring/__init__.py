"""The checks of ``podwatch check``; ``podwatch.cli.doctor`` runs them in order."""
