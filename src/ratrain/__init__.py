"""RATrain: train dense decoder-only language models where memory is small and the network is slow."""

__version__ = "0.1.0"
