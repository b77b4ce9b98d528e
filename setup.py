import sys

if sys.version_info < (3, 12):  # noqa: UP036  before pip resolves, and downloads, anything
    here = f"{sys.executable} is Python {sys.version_info[0]}.{sys.version_info[1]}"
    sys.exit(f"mambaslots needs Python 3.12 or newer; {here}.")

from setuptools import find_packages, setup

setup(
    packages=["mambaslots"] + ["mambaslots." + name for name in find_packages("core")],
    package_dir={"mambaslots": "core"},
    package_data={"mambaslots": ["py.typed"], "mambaslots.serve": ["page/*"]},
)
