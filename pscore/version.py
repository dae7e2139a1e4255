"""The version of the installed distribution, which is read once: a look-up takes 0.5 ms."""

from importlib import metadata

VERSION = metadata.version("paceline")
