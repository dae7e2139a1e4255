"""A worker's connections to other workers, and the driver of its exchanges with them."""
