"""The GitHub workflows: valid, of least privilege, and walked through for its four triggers without running a step."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tools
import yaml

from sage_factory import ROOT, commands
from sage_factory.make import packages
from sage_factory.what import inputs, matrix, plan
from sage_factory.what.build import Build
from sage_factory.what.table import MatrixError
from sage_factory.with_what import tasks, venvs

GITHUB = ROOT / ".github"
WORKFLOW = GITHUB / "workflows" / "build.yml"
LOCK = GITHUB / "workflows" / "lock.yml"
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
ACTION = GITHUB / "actions" / "pixi" / "action.yml"
# YAML reads the key `on` as true.
CONTENTS: dict[str, dict[Any, Any]] = {path.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in WORKFLOWS}
CONTENT = CONTENTS[WORKFLOW.name]
JOBS: dict[str, dict[str, Any]] = CONTENT["jobs"]
# What only starts another workflow.
STARTING = {"build/site": "pages.yml", "withdraw/site": "pages.yml", "weekly/conda-forge": "build.yml"}
EVERY_JOB = {f"{path.stem}/{name}": job for path in WORKFLOWS for name, job in CONTENTS[path.name]["jobs"].items()}
TRIGGERS = {
    "pull request": ("pull_request", "refs/pull/7/merge", {}),
    "main": ("push", "refs/heads/main", {}),
    "tag": ("push", "refs/tags/v2.2.0", {}),
    "tag of sageattn3": ("push", "refs/tags/sageattn3-v1.0.0", {}),
    "by hand": ("workflow_dispatch", "refs/heads/main", {"profile": "python311", "platform": "linux-aarch64"}),
}


def tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = tools.beside(name)
    assert program, f"{name} is not installed: it is among the tests' requirements"
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)


# Valid.


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=lambda path: path.name)
def test_fits_githubs_schema(path: Path, tmp_path: Path) -> None:
    schema = "github-actions" if path == ACTION else "github-workflows"
    done = tool("check-jsonschema", "--builtin-schema", f"vendor.{schema}", str(path))
    assert done.returncode == 0, done.stdout
    broken = tmp_path / "broken.yml"
    broken.write_text(path.read_text(encoding="utf-8").replace("steps:", "stepz:"), encoding="utf-8")
    assert tool("check-jsonschema", "--builtin-schema", f"vendor.{schema}", str(broken)).returncode == 1


def test_zizmor_finds_nothing() -> None:
    done = tool("zizmor", "--offline", "--pedantic", "--no-progress", str(GITHUB))
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(tools.beside("actionlint") is None, reason="actionlint is not on PyPI: `pixi run test` brings it")
def test_actionlint_finds_nothing() -> None:
    # That key is younger than actionlint 1.7.12; the schema above holds its values.
    done = tool("actionlint", "-no-color", "-ignore", 'unexpected key "queue" for "concurrency"', *map(str, WORKFLOWS))
    assert done.returncode == 0, done.stdout


def test_everything_from_outside_is_pinned_by_digest() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (*WORKFLOWS, ACTION))
    used = re.findall(r"uses: (\S+)(.*)", text)
    assert len(used) > 10
    for name, rest in used:
        if name.startswith("./"):
            assert (ROOT / name / "action.yml").is_file()
        else:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name), name
            assert re.match(r" # v\d+\.\d+\.\d+", rest), f"{name} says no version"
    digests: dict[str, set[str]] = {}
    for name, _ in used:
        digests.setdefault(name.split("@")[0], set()).add(name)
    assert all(len(found) == 1 for found in digests.values()), "one version of each action"


def test_steps_are_tasks_that_a_developer_runs() -> None:
    manifest = tasks.Manifest.read(ROOT / "pixi.toml")
    jobs = [job for name, job in EVERY_JOB.items() if name not in STARTING]
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert len(commands) >= 8
    named = set()
    for command in commands:
        words = command.split()
        if words[:2] == ["pixi", "update"]:
            continue
        assert words[:2] in (["pixi", "run"], ["python3", "scripts/run.py"]), command
        named |= {words[2]} if words[2] != '"$TASK"' else set(JOBS["check"]["strategy"]["matrix"]["task"])
    assert named <= manifest.tasks.keys()
    assert {"lint", "test", "build", "verify", "summary", "release", "publish", "index"} <= named


def test_the_lock_is_made_by_pixi_and_proposed_by_a_task() -> None:
    content: dict[Any, Any] = yaml.safe_load(LOCK.read_text(encoding="utf-8"))
    assert content[True].keys() == {"schedule", "workflow_dispatch"}
    (job,) = content["jobs"].values()
    assert content["permissions"] == {}
    assert job["permissions"] == {"contents": "write", "pull-requests": "write"}
    commands = [step["run"].split() for step in job["steps"] if "run" in step]
    assert [command[:3] for command in commands] == [
        ["pixi", "update", "--no-install"],
        ["python3", "scripts/run.py", "propose"],
    ]
    assert "propose" in tasks.Manifest.read(ROOT / "pixi.toml").tasks


@pytest.mark.parametrize("there", [True, False])
def test_every_job_takes_the_lock_as_it_is_where_there_is_one(there: bool, tmp_path: Path) -> None:
    steps = yaml.safe_load(ACTION.read_text(encoding="utf-8"))["runs"]["steps"]
    (script,) = [step["run"] for step in steps if "run" in step]
    if there:
        (tmp_path / "pixi.lock").touch()
    told = tmp_path / "environment"
    told.touch()
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"GITHUB_ENV": str(told)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.read_text() == ("PIXI_LOCKED=true\n" if there else "")
    assert done.stdout.startswith("::warning::there is no pixi.lock") is not there


def test_what_may_write_runs_with_pinned_packages_alone() -> None:
    """pixi without a lock takes the newest of everything, and the action that brings it is one more from outside."""
    writing = {name for name, job in EVERY_JOB.items() if "write" in job["permissions"].values()}
    assert len(writing) == 9
    manifest = tasks.Manifest.read(ROOT / "pixi.toml")
    for name in writing:
        for step in EVERY_JOB[name]["steps"]:
            command = step.get("run", "").split()
            if command[:2] == ["python3", "scripts/run.py"]:
                locks = manifest.locks_of(manifest.environment_of(manifest.task(command[2])))
                assert all(venvs.lock_file(lock).is_file() for lock in locks)
            else:
                assert command[:2] in ([], ["gh", "workflow"], ["pixi", "update"]), name
            used = step.get("uses", "").split("@")[0]
            assert used.startswith("actions/") or not used or (used, name) == ("./.github/actions/pixi", "lock/lock"), name
    # What is listed is deployed.
    assert all("pixi" not in str(step) for step in EVERY_JOB["pages/index"]["steps"])


def test_a_tag_is_checked_before_anything_is_built() -> None:
    (checkout,) = [step for step in JOBS["plan"]["steps"] if "checkout@" in step.get("uses", "")]
    assert checkout["with"]["fetch-depth"] == 0, "main, and all tags"
    assert all("plan" in job["needs"] for name, job in JOBS.items() if name not in ("plan", "check"))


def test_values_from_outside_do_not_become_shell_code() -> None:
    for job in EVERY_JOB.values():
        assert all("${{" not in step.get("run", "") for step in job["steps"])


def test_each_job_has_what_it_needs_and_no_more() -> None:
    assert all(content["permissions"] == {} for content in CONTENTS.values())
    writes = {name: {k for k, v in job["permissions"].items() if v == "write"} for name, job in EVERY_JOB.items()}
    assert {name: found for name, found in writes.items() if found} == {
        "build/attest": {"id-token", "attestations"},
        "build/release": {"contents"},
        "build/channel": {"id-token"},
        "build/site": {"actions"},
        "lock/lock": {"contents", "pull-requests"},
        "weekly/conda-forge": {"actions"},
        "withdraw/withdraw": {"contents"},
        "withdraw/site": {"actions"},
        "pages/pages": {"pages", "id-token"},
    }
    for name in ("build/attest", "pages/pages"):
        assert all("run" not in step for step in EVERY_JOB[name]["steps"]), f"{name} signs, and runs no code of the project"
    for name, started in STARTING.items():
        (step,) = EVERY_JOB[name]["steps"]
        assert step["run"].split()[:4] == ["gh", "workflow", "run", started], "and runs no code of the project"
        assert "workflow_dispatch" in CONTENTS[started][True]
    for name, job in EVERY_JOB.items():
        assert job["timeout-minutes"] <= 120, name
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


# Simulated.


class Expression:
    """What ${{ … }} of this workflow comes to: names, strings, ==, !=, && and fromJSON."""

    def __init__(self, context: Mapping[str, Any]) -> None:
        self.context = context

    def value(self, text: str) -> Any:
        text = text.strip()
        if "&&" in text:
            return all(self.value(part) for part in text.split("&&"))
        if found := re.fullmatch(r"(.+?)\s*(==|!=)\s*(.+)", text):
            return (self.value(found[1]) == self.value(found[3])) is (found[2] == "==")
        if found := re.fullmatch(r"fromJSON\((.+)\)", text):
            return json.loads(self.value(found[1]))
        if found := re.fullmatch(r"'([^']*)'", text):
            return found[1]
        assert re.fullmatch(r"[\w.-]+", text), f"the simulation does not know {text!r}"
        here: Any = self.context
        for part in text.split("."):
            here = here.get(part, "") if isinstance(here, Mapping) else ""
        return here

    def fill(self, text: str) -> Any:
        """A string with its expressions; an expression alone keeps its kind."""
        if found := re.fullmatch(r"\$\{\{(.+?)\}\}", text):
            return self.value(found[1])
        return re.sub(r"\$\{\{(.+?)\}\}", lambda found: str(self.value(found[1])), text)


def jobs_of(trigger: str, channel: str = "https://prefix.dev/ours") -> dict[str, list[dict[str, Any]]]:
    """The jobs that run, by name, each with its matrix: the walk that GitHub would make."""
    event, ref, inputs = TRIGGERS[trigger]
    found = plan.plan(event, ref, inputs.get("profile", ""), inputs.get("platform", ""))
    needs: dict[str, Any] = {}
    context = {"github": {"event_name": event, "ref": ref}, "inputs": inputs, "vars": {"CHANNEL_URL": channel}, "needs": needs}
    ran: dict[str, list[dict[str, Any]]] = {}
    for name, job in JOBS.items():
        wanted = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
        assert all(other in JOBS for other in wanted)
        # A job whose needs were skipped is skipped, too.
        if not all(other in ran for other in wanted) or not Expression(context).value(job.get("if", "'yes'")):
            continue
        combinations = job.get("strategy", {}).get("matrix", {"include": [{}]})
        if isinstance(combinations, str):
            combinations = Expression(context).fill(combinations)
        ran[name] = combinations["include"] if "include" in combinations else [{"task": t} for t in combinations["task"]]
        needs[name] = {"outputs": outputs(job, found)}
    return ran


def outputs(job: Mapping[str, Any], found: plan.Plan) -> dict[str, str]:
    """A job's outputs, where its step is `pixi run plan`."""
    steps = {step["id"]: {"outputs": found.outputs()} for step in job["steps"] if "id" in step}
    return {key: Expression({"steps": steps}).fill(value) for key, value in job.get("outputs", {}).items()}


def builds_of(jobs: Mapping[str, list[dict[str, Any]]]) -> Iterator[Build]:
    """Every wheel that the build jobs make, by asking as they do: one PyTorch, CUDA and platform of the profile."""
    for job in jobs["build"]:
        yield from (
            build
            for python in job["pythons"].split()
            for build in matrix.builds(
                package=job["package"], platform=job["platform"], cuda=job["cuda"], torch=job["torch"], python=python
            )
        )


RELEASE = {"attest", "release", "channel", "site"}


@pytest.mark.parametrize(
    ("trigger", "profile", "platform", "counts", "kernels"),
    [
        ("pull request", "default", None, {"linux-64": 1, "win-64": 1}, ["12.9"]),
        ("main", "stable", None, {"linux-64": 3, "win-64": 3}, ["12.6", "12.8", "12.9"]),
        ("tag", "release", None, {"linux-64": 17, "win-64": 17}, ["12.6", "12.8", "12.9", "13.0"]),
        ("tag of sageattn3", "sage3-release", None, {"linux-64": 6, "win-64": 6}, ["12.8", "12.9", "13.0", "13.1"]),
        ("by hand", "python311", "linux-aarch64", {"linux-aarch64": 3}, ["12.6", "12.8", "12.9"]),
    ],
)
def test_what_a_trigger_builds(
    trigger: str, profile: str, platform: str | None, counts: dict[str, int], kernels: list[str]
) -> None:
    jobs = jobs_of(trigger)
    built = list(builds_of(jobs))
    assert sorted(built, key=str) == sorted(matrix.builds(profile, platform=platform), key=str)
    assert {name: sum(b.platform == name for b in built) for name in {b.platform for b in built}} == counts
    assert [job["cuda"] for job in jobs["kernels"]] == kernels, "once for each CUDA"
    assert {job["runner"] for job in jobs["kernels"]} == {matrix.load().platforms["linux-64"].runner}
    operators = {(job["package"], job["platform"], job["torch"], job["cuda"]) for job in jobs["build"]}
    assert len(operators) == len(jobs["build"]), "operators once for each PyTorch, CUDA and platform"
    installed = [(j["runner"], j["torch"], j["cuda"], j["python"]) for j in jobs["installed"]]
    assert sorted(installed) == sorted((matrix.load().platforms[b.platform].runner, b.torch, b.cuda, b.python) for b in built)
    assert {job["job"] for job in jobs["installed"]} == {job["name"] for job in jobs["build"]}, "whose artifact it takes"
    assert [job["task"] for job in jobs["check"]] == ["lint", "test"]
    assert (jobs.keys() >= RELEASE) == trigger.startswith("tag")
    assert trigger.startswith("tag") or not jobs.keys() & RELEASE


def test_without_a_channel_the_rest_is_released() -> None:
    assert jobs_of("tag", channel="").keys() >= RELEASE - {"channel"}
    assert "channel" not in jobs_of("tag", channel="")


def test_nothing_is_signed_or_released_before_it_was_tested_and_verified() -> None:
    def before(name: str) -> set[str]:
        wanted = JOBS[name].get("needs", [])
        direct = {wanted} if isinstance(wanted, str) else set(wanted)
        return direct.union(*(before(other) for other in direct))

    for name in RELEASE:
        assert {"plan", "check", "kernels", "build", "installed", "collect"} <= before(name), name
    verified = [step.get("run", "") for step in JOBS["collect"]["steps"]]
    assert "pixi run verify" in verified


def test_pages_are_deployed_from_the_default_branch_alone() -> None:
    """GitHub's rule for the environment github-pages, by default: a tag's run, and that of the event `release`, is refused."""
    deploying = {name for name, job in EVERY_JOB.items() if job.get("environment") == "github-pages"}
    assert deploying == {"pages/pages"}
    content = CONTENTS["pages.yml"]
    assert content[True].keys() == {"workflow_dispatch"}, "on other events the ref is not a branch's"
    for name in ("withdraw/withdraw", "pages/index"):
        assert EVERY_JOB[name]["if"] == "github.ref_name == github.event.repository.default_branch"
    assert content["jobs"]["pages"]["needs"] == "index"
    for name in ("build/site", "withdraw/site"):
        # By its name: a release that is made by a workflow's token starts no workflow.
        (step,) = EVERY_JOB[name]["steps"]
        assert step["run"] == 'gh workflow run pages.yml --ref "$DEFAULT_BRANCH"'
        assert step["env"]["DEFAULT_BRANCH"] == "${{ github.event.repository.default_branch }}"
    assert "release" in JOBS["site"]["needs"], "the release is public by then, and listed"
    assert EVERY_JOB["withdraw/site"]["needs"] == "withdraw"


def test_what_github_would_not_run_is_refused() -> None:
    for profile in matrix.load().profiles:
        found = plan.plan(profile=profile)
        if len(found.installs) <= 256:
            assert found.outputs()["profile"] == profile
        else:
            with pytest.raises(MatrixError, match=f"profile {profile} has {len(found.installs)} wheels to install, .*256 jobs"):
                found.outputs()


def test_no_request_is_dropped_for_another() -> None:
    """Of runs of a group GitHub keeps one waiting."""
    assert CONTENTS["withdraw.yml"]["concurrency"]["group"] == "${{ github.workflow }}-${{ inputs.tag }}"
    asked = "${{ inputs.profile }}-${{ inputs.platform }}"
    assert asked in CONTENT["concurrency"]["group"], "not for a push, nor one for another profile or platform"


def test_what_comes_after_a_job_that_may_be_skipped_says_when_it_runs() -> None:
    """GitHub skips whatever needs a skipped job, also by way of others, unless its own condition asks how the run stands."""
    for content in CONTENTS.values():
        jobs = content["jobs"]

        def before(name: str, jobs: Mapping[str, Any] = jobs) -> set[str]:
            wanted = jobs[name].get("needs", [])
            direct = {wanted} if isinstance(wanted, str) else set(wanted)
            return direct.union(*(before(other) for other in direct))

        # Jobs of a release follow one another under the same condition, which is `plan`'s; and elsewhere than on the default branch none shall run.
        together = ("needs.plan.outputs.release == 'true'", "github.ref_name == github.event.repository.default_branch")
        skipped = {name for name, job in jobs.items() if "if" in job and not any(said in job["if"] for said in together)}
        for name, job in jobs.items():
            assert not before(name) & skipped or "cancelled()" in job.get("if", ""), name


def test_an_older_index_is_never_deployed_over_a_newer() -> None:
    """Two releases at once: who lists the releases last deploys last."""
    content = CONTENTS["pages.yml"]
    assert content["concurrency"] == {"group": "${{ github.workflow }}", "cancel-in-progress": False}
    assert all("concurrency" not in job for job in content["jobs"].values()), "of the whole run, listing and deploying"
    for name in ("release", "channel"):
        # Of those that wait GitHub keeps one alone unless it is told otherwise.
        assert JOBS[name]["concurrency"] == {"group": name, "cancel-in-progress": False, "queue": "max"}, "of all tags"


def test_pull_requests_keep_their_files_for_a_week() -> None:
    kept = {trigger: plan.plan(event, ref, **inputs).retention_days for trigger, (event, ref, inputs) in TRIGGERS.items()}
    assert kept["pull request"] == 7
    uploads = [step["with"] for job in JOBS.values() for step in job["steps"] if "upload-artifact@" in step.get("uses", "")]
    assert len(uploads) == 3
    assert {upload["retention-days"] for upload in uploads} == {"${{ needs.plan.outputs.retention-days }}"}


@pytest.mark.parametrize("trigger", TRIGGERS)
def test_no_path_is_in_two_artifacts(trigger: str) -> None:
    """They are laid into one folder by several downloads at once: a path that is in two would be written by both."""
    jobs = jobs_of(trigger)
    profile = plan.plan(*TRIGGERS[trigger][:2], **TRIGGERS[trigger][2]).profile
    found: dict[str, list[str]] = {}
    for name in ("kernels", "build"):
        (upload,) = [step["with"] for step in JOBS[name]["steps"] if "upload-artifact@" in step.get("uses", "")]
        for job in jobs[name]:
            fill = Expression({"matrix": job}).fill
            tag = f"cu{job['cuda'].replace('.', '')}"
            # What a build leaves in dist/.
            package = job.get("package", "").removesuffix("-cubins")
            made = [f"dist/conda/noarch/{package}-cubins-2.2.0-{tag}_h1_0.conda", "dist/conda/noarch/repodata.json"]
            made.append(f"dist/reports/kernels-{profile}-{package}-cu{job['cuda']}.json")
            if name == "build":
                build = matrix.builds(package=package, platform=job["platform"], cuda=job["cuda"], torch=job["torch"])[0]
                made[-1] = f"dist/reports/{job['platform']}-{profile}-{package}-torch{job['torch']}-cu{job['cuda']}.json"
                made += [f"dist/conda/{job['platform']}/{one}" for one in (f"{build.operators_stem}2_0.conda", "repodata.json")]
                pythons = job["pythons"].split()
                made += [f"dist/wheels/{dataclasses.replace(build, python=python).wheel_name}" for python in pythons]
            patterns = fill(upload["path"]).split()
            taken = [path for path in made if any(Path(path).match(pattern) for pattern in patterns)]
            assert len(taken) == (2 if name == "kernels" else 2 + len(job["pythons"].split())), taken
            for path in taken:
                found.setdefault(path, []).append(fill(upload["name"]))
    assert {path: names for path, names in found.items() if len(names) > 1} == {}
    assert sum(path.endswith(".whl") for path in found) == len(list(builds_of(jobs)))


def test_kernels_are_handed_on_to_where_the_build_looks() -> None:
    (up,) = [s["with"] for s in JOBS["kernels"]["steps"] if "upload-artifact@" in s.get("uses", "")]
    (down,) = [s["with"] for s in JOBS["build"]["steps"] if "download-artifact@" in s.get("uses", "")]
    fill = Expression({"matrix": {"package": "sageattn3", "cuda": "12.8"}}).fill
    assert fill(up["name"]) == fill(down["name"]) == "dist-kernels-sageattn3-cu12.8"
    # An artifact's paths start below what all of its own have in common.
    uploaded = [Path(line) for line in up["path"].split()]
    below = Path(os.path.commonpath(uploaded))
    assert below == Path("dist")
    assert ROOT / down["path"] / uploaded[0].relative_to(below).parent == packages.PACKAGES / "noarch"


def test_checkouts_have_the_same_bytes_on_every_runner() -> None:
    """Else Windows would look for kernels of another digest than those that Linux compiled."""
    lines = (ROOT / ".gitattributes").read_text(encoding="utf-8").splitlines()
    assert "* text=auto eol=lf" in lines
    assert b"\r" not in b"".join(
        path.read_bytes() for path in inputs.files([*inputs.operators("sageattention"), *inputs.operators("sageattn3")])
    )


def test_a_channel_that_the_workflow_cannot_publish_to_is_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHANNEL_URL", "s3://bucket/ours")
    asked = ["plan", "--event", "push", "--releases", "", "--ref"]
    assert commands.main([*asked, "refs/tags/v2.2.0"]) == 2
    assert "the channel s3://bucket/ours takes the program `rattler-build`" in capsys.readouterr().err
    assert commands.main([*asked, "refs/heads/main"]) == 0, "nothing is published"
    for folder in ("conda.example.org/ours", "file:///srv/conda"):
        monkeypatch.setenv("CHANNEL_URL", folder)
        assert commands.main([*asked, "refs/tags/v2.2.0"]) == 2
        assert f"the channel {folder} is on no server" in capsys.readouterr().err
    monkeypatch.setenv("CHANNEL_URL", "https://prefix.dev/ours")
    assert commands.main([*asked, "refs/tags/v2.2.0"]) == 0


@pytest.mark.parametrize("name", ["vnext", "release-3"])
def test_a_tag_of_no_package_is_refused_before_anything_is_built(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The workflow is started by any that begins with v."""
    assert commands.main(["plan", "--event", "push", "--releases", "", "--ref", f"refs/tags/{name}"]) == 2
    assert f"tag {name} is of no package of variants.yaml: expected one such as v2.2.0 or" in capsys.readouterr().err


def test_plan_tells_the_workflow(tmp_path: Path) -> None:
    environment = os.environ | {"GITHUB_OUTPUT": str(tmp_path / "out")}
    command = [
        sys.executable,
        str(ROOT / "scripts"),
        "plan",
        "--event",
        "pull_request",
        "--ref",
        "refs/pull/7/merge",
    ]
    done = subprocess.run(
        [*command, "--profile", "", "--platform", ""], capture_output=True, text=True, check=True, env=environment
    )
    assert "default: 2 builds, kept 7 days" in done.stdout
    told = dict(line.split("=", 1) for line in (tmp_path / "out").read_text(encoding="utf-8").splitlines())
    assert told == plan.plan("pull_request").outputs()
    assert set(JOBS["plan"]["outputs"]) == set(told)
    wrong = subprocess.run([*command[:3], "--event", "workflow_dispatch"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "name one with --profile" in wrong.stderr
