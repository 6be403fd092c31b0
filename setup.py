"""Build the two compiled parts: the tree (`_radix`) and the link to libllama (`_llama`).

Everything else about the distribution stands in pyproject.toml.  Neither extension is linked against
llama.cpp: `_llama` finds the library that llama-cpp-python has loaded, when it is imported.
"""

import os
import sys

from Cython.Build import cythonize
from setuptools import Extension, setup

optimise = ["/O2"] if sys.platform == "win32" else ["-O3", "-fno-strict-aliasing"]
macros = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]

extensions = [
    Extension(
        f"skippy.{name}",
        [f"skippy/{name}.pyx"],
        extra_compile_args=optimise,
        define_macros=macros,
    )
    for name in ("_radix", "_llama")
]

setup(
    ext_modules=cythonize(
        extensions,
        language_level=3,
        annotate=bool(os.environ.get("SKIPPY_ANNOTATE")),
        compiler_directives={
            "binding": True,
            "boundscheck": False,
            "cdivision": True,
            "embedsignature": True,
            "initializedcheck": False,
            "wraparound": False,
        },
    )
)
