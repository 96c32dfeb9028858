"""Finds the packages, and adds to a wheel what Jinja makes of the templates; all else is in
pyproject.toml."""

import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

# In a process of its own, which imports what the wheel will hold, and leaves no bytecode in it.
_COMPILE = """
import sys
sys.path.insert(0, ".")
from urdir.ptxgen.render.jinja import write_modules
write_modules()
"""


# pytest rewrites the asserts of distributions that bring plugins, and finds their modules by names
# of files. If none lies at the top it strips the first folder: it would take `__main__`, and a
# project's own `driver` and `model`, for urdir's.
_TOP = '"""Empty: the top of a distribution whose packages are in a namespace, for pytest."""\n'


class _BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            # `urdir` has no package of its own, but `python -m urdir` is the command
            self.copy_file("model/__main__.py", f"{self.build_lib}/urdir/__main__.py")
            Path(self.build_lib, "urdir_top.py").write_text(_TOP, encoding="utf-8")
            subprocess.run([sys.executable, "-B", "-c", _COMPILE], cwd=self.build_lib, check=True)


# The folders of the checkout are `urdir.*` when installed.
_FOLDERS = ("driver", "model", "ptxgen", "templates")
_PACKAGES = [
    f"urdir.{name}"
    for folder in _FOLDERS
    for name in (folder, *(f"{folder}.{inner}" for inner in find_packages(folder)))
]

setup(packages=_PACKAGES, cmdclass={"build_py": _BuildPy})
