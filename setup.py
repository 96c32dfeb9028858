"""Adds to a wheel what Jinja makes of the templates; all else is in pyproject.toml."""

import subprocess
import sys

from setuptools import setup
from setuptools.command.build_py import build_py

# In a process of its own, which imports what the wheel will hold, and leaves no bytecode in it.
_COMPILE = """
import sys
sys.path.insert(0, ".")
from urdir.ptxgen.template_environment import write_modules
write_modules()
"""


class _BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            subprocess.run([sys.executable, "-B", "-c", _COMPILE], cwd=self.build_lib, check=True)


setup(cmdclass={"build_py": _BuildPy})
