"""Compiles the kernels for CPUs, several files at a time. All else is in pyproject.toml."""

import os
import sysconfig
from concurrent.futures import ThreadPoolExecutor

from setuptools import setup
from setuptools.command.build_ext import build_ext

# g++ takes half a GB for one of these files, and boards have 8
_MOST_JOBS = 4


class BuildKernels(build_ext):
    """Compiles several files at a time, where setuptools would take them in turn."""

    def build_extensions(self):
        compile_files = self.compiler.compile
        jobs = min(os.cpu_count() or 1, _MOST_JOBS)

        def compile_together(sources, **options):
            with ThreadPoolExecutor(jobs) as pool:
                objects = pool.map(lambda source: compile_files([source], **options), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_together
        super().build_extensions()


# setuptools refuses this name for a Python without a global lock
free_threaded = sysconfig.get_config_var("Py_GIL_DISABLED")
setup(
    cmdclass={"build_ext": BuildKernels},
    options={} if free_threaded else {"bdist_wheel": {"py_limited_api": "cp310"}},
)
