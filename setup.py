import sys

if sys.version_info < (3, 12):  # before pip resolves, and downloads, anything
    sys.exit("mambaslots needs Python 3.12 or newer; %s is Python %d.%d." % ((sys.executable,) + sys.version_info[:2]))

from setuptools import find_packages, setup  # noqa: E402

setup(
    packages=["mambaslots"] + ["mambaslots." + name for name in find_packages("core")],
    package_dir={"mambaslots": "core"},
    package_data={"mambaslots": ["py.typed"], "mambaslots.serve": ["page/*"]},
)
