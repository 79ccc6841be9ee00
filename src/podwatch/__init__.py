"""podwatch: keeps an unattended RL training run alive on a rented GPU pod, and its checkpoints safe."""

__version__ = "0.1.0"
