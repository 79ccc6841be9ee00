"""The families of checks behind ``podwatch check``; ``podwatch.cli.doctor`` puts them in order."""
