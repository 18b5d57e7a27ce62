"""Manifests, image and citation: against their schemas, which `make schemas` installs, and against the program."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import ROOT
from torch.distributed.run import get_args_parser

import distflow
from distflow import launch
from distflow.config.command_line import span_of
from distflow.rpc.host import HOST
from distflow.rpc.run_token import TOKEN

JOBSET, CLAIM, POLICY = yaml.safe_load_all((ROOT / "deploy/kubernetes/train.yaml").read_text())
MACHINES, ETCD, SERVICE, MACHINES_POLICY = yaml.safe_load_all((ROOT / "deploy/kubernetes/machines.yaml").read_text())
JOB = JOBSET["spec"]["replicatedJobs"][0]["template"]
POD = JOB["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
KUBERNETES = ("1.30", "1.37")


def program(name: str) -> str:
    """The path of a program of this Python's environment; skips the test without it."""
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    return found or pytest.skip(f"no {name}: make schemas")


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("manifest", [
    CLAIM, POLICY, {**JOB, "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "machine"}}, MACHINES, ETCD,
    SERVICE, MACHINES_POLICY], ids=lambda manifest: f"{manifest['kind']} {manifest['metadata']['name']}")
def test_a_manifest_has_the_form_of_its_kind(manifest, version):
    schemas = pytest.importorskip("kubernetes_validate", reason="make schemas")
    schemas.validate(manifest, version, strict=True)


def test_the_jobset_has_the_form_of_its_kind():
    """Its types drop a key that they do not know."""
    types = pytest.importorskip("kubeflow_trainer_api.models", reason="make schemas")
    assert types.JobsetV1alpha2JobSet.from_dict(JOBSET).to_dict() == JOBSET


def variable(name: str) -> Any:
    return next(each for each in CONTAINER["env"] if each["name"] == name)


def test_the_pods_start_a_run_that_can_meet():
    torchrun = get_args_parser().parse_args([each.replace("$(INDEX)", "1") for each in CONTAINER["args"]])
    assert {int(torchrun.nnodes), JOB["spec"]["completions"], JOB["spec"]["parallelism"]} == {2}
    name, job, domain = (JOBSET["metadata"]["name"], JOBSET["spec"]["replicatedJobs"][0]["name"],
                         JOBSET["spec"]["network"]["subdomain"])
    assert torchrun.master_addr == f"{name}-{job}-0-0.{domain}"
    assert torchrun.module
    assert torchrun.training_script == "distflow.launch"
    options = launch.parser().parse_args(torchrun.training_script_args)
    assert options.resume_if_exists
    assert options.name
    assert variable(HOST)["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert "secretKeyRef" in variable(TOKEN)["valueFrom"]
    labels = {"jobset.sigs.k8s.io/jobset-name": name}
    assert [POLICY["spec"]["podSelector"], *POLICY["spec"]["ingress"][0]["from"][0].values()] == [
        {"matchLabels": labels}] * 2
    mounted = {each["name"]: each["mountPath"] for each in CONTAINER["volumeMounts"]}
    assert mounted == {"shared": CONTAINER["workingDir"], "memory": "/dev/shm"}
    assert POD["volumes"][0]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]


def test_the_pods_of_machines_that_come_and_go_meet_at_the_etcd():
    pod = MACHINES["spec"]["template"]
    container, = pod["spec"]["containers"]
    torchrun = get_args_parser().parse_args(container["args"])
    options = launch.parser().parse_args(torchrun.training_script_args)
    least, most = span_of(options.machines)
    assert torchrun.standalone
    assert least < most == MACHINES["spec"]["completions"] == MACHINES["spec"]["parallelism"]
    assert options.store.startswith(f"etcd://{SERVICE['metadata']['name']}:{SERVICE['spec']['ports'][0]['port']}/")
    assert SERVICE["spec"]["selector"] == ETCD["spec"]["selector"]["matchLabels"]
    assert ETCD["spec"]["template"]["metadata"]["labels"] == SERVICE["spec"]["selector"]
    labels = MACHINES_POLICY["spec"]["podSelector"]["matchExpressions"][0]["values"]
    assert labels == [pod["metadata"]["labels"]["run"], SERVICE["spec"]["selector"]["run"]]
    of_train = {each["name"]: each for each in CONTAINER["env"]}
    assert [each == of_train[each["name"]] for each in container["env"]] == [True, True], "host and token"
    assert {key: pod["spec"][key] for key in ("securityContext", "volumes")} == {
        key: POD[key] for key in ("securityContext", "volumes")}


def test_a_pod_has_more_time_than_its_run():
    overrides = dict(each.removeprefix("--set=").split("=") for each in CONTAINER["args"] if each.startswith("--set="))
    run = float(overrides["robust.shutdown_timeout"])
    torchrun = float(variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")["value"])
    assert run < torchrun < POD["terminationGracePeriodSeconds"]


def test_the_image_has_what_the_package_has():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    tops = {package.partition(".")[0] for package in config["options"]["packages"].split()}
    tops |= {folder.partition("= ")[2] for folder in config["options"]["package_dir"].strip().splitlines()}
    copied = {source for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE) for source in line.split()[:-1]}
    assert tops <= copied
    allowed = (ROOT / ".dockerignore").read_text().split()
    assert [name for name in copied if not (ROOT / name).exists() or f"!{name}" not in allowed] == []


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_image_runs_as_the_user_of_the_manifest(target):
    stage = next(part for part in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
                 if part.startswith(f"base AS {target}\n"))
    assert f"\nUSER {POD['securityContext']['runAsUser']}\n" in stage
    assert f"\nWORKDIR {CONTAINER['workingDir']}\n" in stage


def test_the_dockerfile_is_linted():
    done = subprocess.run([program("hadolint"), "--no-color", str(ROOT / "Dockerfile")], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stdout


def test_the_citation_has_the_form_of_citations_and_this_version():
    file = ROOT / "CITATION.cff"
    citation = yaml.safe_load(file.read_text())
    assert citation["version"] == distflow.__version__
    assert len(citation["references"]) == 4
    done = subprocess.run([program("check-jsonschema"), "--builtin-schema", "vendor.citation-file-format", str(file)],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
