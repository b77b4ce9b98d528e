"""The version of mambaslots, for all that names it."""

VERSION = "0.1.0"
