"""Drivers for other systems that move gradients: peers, measured beside Paceline in one run."""
