"""Drivers for what else moves gradients: peers, measured beside Paceline in one run."""
