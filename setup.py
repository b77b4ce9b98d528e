from setuptools import find_packages, setup

setup(
    packages=["mambaslots"] + ["mambaslots." + name for name in find_packages("core")],
    package_dir={"mambaslots": "core"},
    package_data={"mambaslots": ["py.typed"], "mambaslots.serve": ["page/*"]},
)
