"""The Kubernetes manifests against the schemas of what reads them, with unknown fields forbidden."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator
from test_k8s import K8S, VARIANTS, Object, ray_cluster, render

KUBERNETES = "1.37"
CUSTOM = json.loads(Path(__file__).with_name("custom_resources.json").read_text())["schemas"]
CUSTOM["ray.io/v1 RayJob"]["properties"]["spec"]["properties"]["rayClusterSpec"] = CUSTOM["ray.io/v1 RayCluster"][
    "properties"
]["spec"]
MOST_NAME = {"RayCluster": 53, "RayJob": 47}
"""Characters: KubeRay makes other names of these (ray-operator/controllers/ray/utils/constant.go)."""
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
RAY_WITH_TOKENS = (2, 52)


MOST_POD_SETS = 18
"""Kinds of pods in one of Kueue's workloads (pkg/controller/jobframework/constants.go)."""
PLACES = (*VARIANTS, "namespace")


@functools.cache
def applied(place: str) -> tuple[Object, ...]:
    """What is applied of a variant, or the namespace."""
    if place == "namespace":
        return (yaml.safe_load((K8S / "namespace.yaml").read_text()),)
    return render(place)


def faults(o: Object) -> list[str]:
    """What the schema of its kind finds wrong with an object."""
    kind = f"{o['apiVersion']} {o['kind']}"
    if kind not in CUSTOM:
        return core_faults(o)
    errors = Draft202012Validator(CUSTOM[kind]).iter_errors(o)
    return [error.message[:300] for error in errors] + [fault for pod in pod_templates(o) for fault in core_faults(pod)]


def core_faults(o: Object) -> list[str]:
    """The same of Kubernetes' own kinds."""
    try:
        kubernetes_validate.validate(o, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{list(error.path)}: {error.message[:300]}"]
    return []


def pod_templates(o: Object) -> list[Object]:
    """Those within one of KubeRay's objects, each as an object of its own."""
    if not o["apiVersion"].startswith("ray.io/"):
        return []
    cluster = ray_cluster((o,))
    specs = [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    specs += [o["spec"]["submitterPodTemplate"]] if o["kind"] == "RayJob" else []
    named = {"metadata": {"name": "within"}, "apiVersion": "v1", "kind": "PodTemplate"}
    return [named | {"template": template} for template in specs]


@pytest.mark.parametrize("place", PLACES)
def test_the_schemas_allow_every_field(place: str) -> None:
    wrong = {f"{o['kind']} {o['metadata']['name']}": faults(o) for o in applied(place)}
    assert {name: errors for name, errors in wrong.items() if errors} == {}


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("Deployment", ["spec", "template", "spec"]),
        ("RayJob", ["spec"]),
        ("RayJob", ["spec", "rayClusterSpec", "headGroupSpec"]),
        ("RayJob", ["spec", "rayClusterSpec", "headGroupSpec", "template", "spec"]),
        ("RayCluster", ["spec", "autoscalerOptions"]),
        ("ClusterQueue", ["spec"]),
    ],
)
def test_a_field_that_is_not_known_is_found(kind: str, path: list[str]) -> None:
    every = (o for place in PLACES for o in applied(place))
    o = json.loads(json.dumps(next(o for o in every if o["kind"] == kind)))
    within = o
    for step in path:
        within = within[step]
    within["replicaz"] = 1
    (fault,) = faults(o)
    assert "replicaz" in fault


@pytest.mark.parametrize("variant", VARIANTS)
def test_kuberay_admits_it(variant: str) -> None:
    """Its operator's rules, where they concern what is used here (ray-operator/controllers/ray/utils/validation.go)."""
    (o,) = (o for o in render(variant) if o["apiVersion"].startswith("ray.io/"))
    name, spec, cluster = o["metadata"]["name"], o["spec"], ray_cluster((o,))
    assert DNS_LABEL.fullmatch(name) and len(name) <= MOST_NAME[o["kind"]]
    assert tuple(map(int, cluster["rayVersion"].split(".")[:2])) >= RAY_WITH_TOKENS
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert "labels" not in group["rayStartParams"] and not group.get("suspend")
        assert group["template"]["spec"].get("restartPolicy", "Never") == "Never", "as its second autoscaler asks"
        reserved = {"num-cpus", "num-gpus", "memory", "resources"} & group["rayStartParams"].keys()
        assert not (reserved and group.get("resources"))
    assert all(0 <= group["minReplicas"] <= group["maxReplicas"] for group in cluster["workerGroupSpecs"])
    if o["kind"] == "RayJob":
        assert spec.get("submissionMode", "K8sJobMode") == "K8sJobMode", "the one with retries and a submitter's pod"
        assert spec["backoffLimit"] >= 0 and spec["ttlSecondsAfterFinished"] >= 0 < spec["activeDeadlineSeconds"]


def test_kueue_admits_it() -> None:
    """The rules of its webhook for a RayJob (pkg/controller/jobs/rayjob/rayjob_webhook.go, raycluster/common.go)."""
    (o,) = (o for o in render("everything") if o["kind"] == "RayJob")
    cluster = ray_cluster((o,))
    assert o["spec"]["shutdownAfterJobFinishes"] and "clusterSelector" not in o["spec"]
    elastic = o["metadata"]["annotations"].get("kueue.x-k8s.io/elastic-job") == "true"
    assert elastic == cluster["enableInTreeAutoscaling"], "a queued job may only grow as an elastic one"
    names = [group["groupName"] for group in cluster["workerGroupSpecs"]]
    assert "head" not in names and len(names) + 1 <= MOST_POD_SETS
