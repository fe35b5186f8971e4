"""Build one output of recipe/recipe.yaml with rattler-build, then run its tests."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from rattler.index import index_fs
from rattler_build import (
    Package,
    PlatformConfig,
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

from sage_factory import ROOT, FactoryError
from sage_factory.make import archives, seal


class TestError(FactoryError):
    """A package that failed its own tests."""


RECIPE = ROOT / "recipe" / "recipe.yaml"


def render(variant: Mapping[str, Sequence[str]], recipe: Path = RECIPE) -> dict[str, RenderedVariant]:
    """The recipe's outputs for one variant, by package name."""
    target = variant["target_platform"][0]
    config = RenderConfig(PlatformConfig(target_platform=target, build_platform=target))
    values = {key: list(value) for key, value in variant.items() if key != "target_platform"}
    rendered = Stage0Recipe.from_file(recipe).render(VariantConfig(values), config)
    return {one.recipe.package.name: one for one in rendered}


class Lines:
    """The engine's log as plain lines, which `build` reads its progress from (a ProgressCallback)."""

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


def _remote(channels: Sequence[str]) -> bool:
    """Whether repodata comes over the network, where its compressed and sharded forms are worth asking for."""
    return not all(channel.startswith("file:") for channel in channels)


def build(one: RenderedVariant, channels: Sequence[str], output: Path) -> Path:
    """Build a package into the channel `output`."""
    remote = _remote(channels)
    tools = ToolConfiguration(
        test_strategy="skip", channel_priority="disabled", use_sharded=remote, use_zstd=remote, use_bz2=remote
    )
    result = one.run_build(
        tools,
        output,
        list(channels),
        Lines(),
        no_build_id=True,
        package_format="conda",
        no_include_recipe=True,
    )
    made = Path(result.packages[0])  # text, whatever the locale: the folder has the name here that Python gives it
    return output / made.parent.name / made.name


def test(package: Path, channels: Sequence[str]) -> list[str]:
    """Run the tests inside a package; what failed."""
    remote = _remote(channels)
    results = Package.from_file(package).run_tests(
        channel=list(channels),
        channel_priority="disabled",
        use_sharded=remote,
        use_zstd=remote,
        use_bz2=remote,
        progress_callback=Lines(),
    )
    return [f"test {r.test_index} of {package.name} failed:\n" + "\n".join(r.output) for r in results if not r.success]


def index(channel: Path) -> None:
    """Make a folder a channel, or its index that of what lies there now; what is damaged is removed, to be built again."""
    (channel / "noarch").mkdir(parents=True, exist_ok=True)
    for path in channel.glob("*/*.conda"):
        try:
            archives.read_conda(path)
        except archives.ArtifactError as error:  # the indexer would panic
            print(f"removing {path}: {error}", flush=True)
            path.unlink()
    asyncio.run(index_fs(channel, write_zst=False, write_shards=False, force=True))


def make(one: RenderedVariant, channels: Sequence[str], output: Path, seconds: int) -> Path:
    """Build, seal and test a package apart, and only then put it where it will be found."""
    making = output.with_name("making")
    shutil.rmtree(making, ignore_errors=True)
    index(output)
    channels = [output.as_uri(), *channels]
    print("step: build", flush=True)
    package = build(one, channels, making)
    # Sealed before it is tested: what is tested is what is shipped.
    seal.seal(package, seconds)
    print("step: test", flush=True)
    if faults := test(package, channels):
        raise TestError("\n".join(faults))
    target = output / package.parent.name / package.name
    target.parent.mkdir(exist_ok=True)
    package.replace(target)
    index(output)
    return target
