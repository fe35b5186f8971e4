"""Build one output of recipe/recipe.yaml with rattler-build, then run its tests.

scripts/build.py runs this as a child, so that an interrupted build ends with the compilers that it started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import seal
from rattler.index import index_fs
from rattler_build import (
    Package,
    PlatformConfig,
    RattlerBuildError,
    RenderConfig,
    RenderedVariant,
    Stage0Recipe,
    ToolConfiguration,
    VariantConfig,
)
from rattler_build.progress import (
    BuildStepEvent,
    DownloadCompleteEvent,
    DownloadProgressEvent,
    DownloadStartEvent,
    LogEvent,
)

RECIPE = Path(__file__).resolve().parent.parent / "recipe" / "recipe.yaml"


def render(variant: Mapping[str, Sequence[str]], recipe: Path = RECIPE) -> dict[str, RenderedVariant]:
    """The recipe's outputs for one variant, by package name."""
    target = variant["target_platform"][0]
    config = RenderConfig(PlatformConfig(target_platform=target, build_platform=target))
    values = {key: list(value) for key, value in variant.items() if key != "target_platform"}
    rendered = Stage0Recipe.from_file(recipe).render(VariantConfig(values), config)
    return {one.recipe.package.name: one for one in rendered}


class Lines:
    """The engine's log as plain lines, which build.py reads its progress from (a ProgressCallback)."""

    def on_download_start(self, event: DownloadStartEvent) -> None:
        print(f"downloading {event.url.rpartition('/')[2]}", flush=True)

    def on_download_progress(self, event: DownloadProgressEvent) -> None:
        pass

    def on_download_complete(self, event: DownloadCompleteEvent) -> None:
        pass

    def on_build_step(self, event: BuildStepEvent) -> None:
        pass

    def on_log(self, event: LogEvent) -> None:
        print(event.message, flush=True)


def build(one: RenderedVariant, channels: Sequence[str], output: Path) -> Path:
    """Build a package into the channel `output`, where packages of earlier outputs are found too."""
    tools = ToolConfiguration(test_strategy="skip", channel_priority="disabled", use_sharded=False, use_zstd=False)
    result = one.run_build(
        tools,
        output,
        list(channels),
        Lines(),
        no_build_id=True,
        package_format="conda",
        no_include_recipe=True,
    )
    return Path(result.packages[0])


def test(package: Path, channels: Sequence[str], output: Path) -> list[str]:
    """Run the tests inside a package; what failed."""
    results = Package.from_file(package).run_tests(
        channel=[output.as_uri(), *channels],
        channel_priority="disabled",
        use_sharded=False,
        use_zstd=False,
        progress_callback=Lines(),
    )
    return [f"test {r.test_index} of {package.name} failed:\n" + "\n".join(r.output) for r in results if not r.success]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the output to build")
    parser.add_argument("--variant", type=Path, required=True, help="JSON file of matrix.variant()")
    parser.add_argument("--channel", action="append", required=True, help="where requirements come from")
    parser.add_argument("--seconds", type=int, required=True, help="the package's time, in seconds since 1970")
    parser.add_argument("--output", type=Path, required=True, help="the channel to build into")
    args = parser.parse_args()
    try:
        variant = json.loads(args.variant.read_text(encoding="utf-8"))
        print("step: build", flush=True)
        package = build(render(variant)[args.name], args.channel, args.output.resolve())
        # Sealed before it is tested: what is tested is what is shipped.
        seal.seal(package, args.seconds)
        asyncio.run(index_fs(args.output.resolve(), write_zst=False, write_shards=False, force=True))
        print("step: test", flush=True)
        faults = test(package, args.channel, args.output.resolve())
    except (RattlerBuildError, OSError) as error:
        print(f"error: {error}", flush=True)
        return 1
    for fault in faults:
        print(f"error: {fault}", flush=True)
    if faults:
        # A package that fails its own tests must not be found by the next build.
        package.unlink()
        return 1
    print(f"package: {package}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
