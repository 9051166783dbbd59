"""Rewarden: reinforcement learning from human feedback with rewards you can trust."""

__version__ = "0.1.0"
