"""The faults that pixi.toml once had, to be put back one by one: the schema of pixi's manifest accepts every one of them."""

from __future__ import annotations

import re


def platform_named_like_its_subdir(text: str) -> str:
    return text.replace('"linux-64",\n', '{ name = "linux-64", platform = "linux-64", glibc = "2.28" },\n', 1)


def compiler_for_13_where_the_driver_is_12(text: str) -> str:
    return text.replace('cu130 = ["cu130", "compiler", "build", "any-driver"]', 'cu130 = ["cu130", "compiler", "build"]', 1)


def pixi_that_gives_a_bare_name_to_variants(text: str) -> str:
    return re.sub(r'requires-pixi = "[^"]*"', 'requires-pixi = ">=0.71"', text, count=1)


def floors_that_conda_forge_does_not_have(text: str) -> str:
    return text.replace('py-rattler = ">=0.23.2"', 'py-rattler = ">=0.28"', 1)
