"""The version of the installed distribution, which is read once: a look-up takes 0.5 ms."""

from importlib import metadata

try:
    VERSION = metadata.version("paceline")
except metadata.PackageNotFoundError:  # A tree of sources beside the installed dependencies.
    VERSION = "0+unknown"
