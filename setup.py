"""Says what of the package is compiled; setup.cfg has the rest. Without a compiler Python does the same, slower."""

import sysconfig

from setuptools import Extension, setup

LIMITED = {"define_macros": [("Py_LIMITED_API", "0x030B0000")], "py_limited_api": True}
"""One build serves Python 3.11 and all later ones; those without the interpreter lock have no such interface."""
COPIES = Extension("distflow.data.compiled_copies", ["distflow/data/compiled_copies.c"], optional=True, **LIMITED)

setup(**{} if sysconfig.get_config_var("Py_GIL_DISABLED") else {
    "ext_modules": [COPIES], "options": {"bdist_wheel": {"py_limited_api": "cp311"}}})
