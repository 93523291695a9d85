"""The Kubernetes manifests render, agree with autofit's own commands, variables and routes, and with one another."""

from __future__ import annotations

import copy
import functools
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from autofit import __version__
from autofit.api.app import create_app
from autofit.api.server import TOKEN_VARIABLE
from autofit.catalog import hardware, models, space
from autofit.cli.main import app
from autofit.core.units import parse_bytes, parse_duration
from autofit.core.workload import METHODS, Effect
from autofit.store import Store
from autofit.store.database.address import ENVIRONMENT, Address
from autofit.store.database.engine import Database
from tests.made_stores import put

HARDWARE_LABEL = "autofit.io/hardware"

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
README = (K8S / "README.md").read_text()
PART, COMPONENT, NAME = "app.kubernetes.io/part-of", "app.kubernetes.io/component", "app.kubernetes.io/name"
SEARCHES = {"overlays/h100": "autofit-search", "overlays/cpu-smoke": "autofit-smoke"}
SERVICE = "overlays/service"
CARDS = tuple(sorted(folder.name for folder in (K8S / "components" / "gpu").iterdir()))
EVERYTHING = (*(f"gpu/{card}" for card in CARDS), "search", "kueue", "backup")
"""Components that an overlay may have together, in the order that the README asks for."""
VARIANTS = (*SEARCHES, SERVICE, "everything")

OPENING = ("api", "ray-head")
"""The components that open the store for as long as they run."""

Object = dict[str, Any]

BESIDE_PYTHON = str(Path(sys.executable).parent)
KUBECTL = shutil.which("kubectl", path=os.pathsep.join([BESIDE_PYTHON, os.environ["PATH"]])) or "kubectl"
"""The real one: the extra `dev` installs it."""


@functools.cache
def render(variant: str) -> tuple[Object, ...]:
    """What is applied."""
    return overlay(*EVERYTHING) if variant == "everything" else kustomized(K8S / variant)


@functools.cache
def overlay(*components: str) -> tuple[Object, ...]:
    """What is applied by an overlay of one's own with these components."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(K8S, Path(folder, "k8s"))
        own = Path(folder, "k8s", "overlays", "own")
        own.mkdir()
        options = {"name": "autofit-search", "namespace": "autofit", "literals": ["HARDWARE=l40s"]}
        named = {"resources": ["../../base"], "components": [f"../../components/{name}" for name in components]}
        if "search" in components:
            named["configMapGenerator"] = [options]  # type: ignore[list-item]
        (own / "kustomization.yaml").write_text(yaml.safe_dump(named))
        return kustomized(own)


def kustomized(folder: Path) -> tuple[Object, ...]:
    done = subprocess.run([KUBECTL, "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "kustomize warns of what it will refuse one day"
    return tuple(yaml.safe_load_all(done.stdout))


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def objects(variant: str) -> tuple[Object, ...]:
    return render(variant)


@pytest.fixture(params=SEARCHES)
def searching(request: pytest.FixtureRequest) -> str:
    """Each overlay that is one search."""
    return str(request.param)


def of_kind(objects: tuple[Object, ...], kind: str) -> list[Object]:
    return [o for o in objects if o["kind"] == kind]


def the(objects: tuple[Object, ...], kind: str, name: str) -> Object:
    (result,) = (o for o in of_kind(objects, kind) if o["metadata"]["name"] == name)
    return result


def ray_job(objects: tuple[Object, ...]) -> Object:
    (job,) = of_kind(objects, "RayJob")
    return job


def templates(objects: tuple[Object, ...]) -> dict[str, Object]:
    """The pod templates by component."""
    found = [o["spec"]["template"] for o in objects if o["kind"] in ("Deployment", "StatefulSet", "Job")]
    found += [job["spec"]["jobTemplate"]["spec"]["template"] for job in of_kind(objects, "CronJob")]
    found += [job["spec"]["submitterPodTemplate"] for job in of_kind(objects, "RayJob")]
    cluster = ray_cluster(objects)
    found.append(cluster["headGroupSpec"]["template"])
    # Worker groups differ in their nodes alone, as a test makes sure of.
    found += [group["template"] for group in cluster["workerGroupSpecs"]]
    return {template["metadata"]["labels"][COMPONENT]: template for template in found}


def ray_cluster(objects: tuple[Object, ...]) -> Object:
    """The specification of the one Ray cluster, a search's or the service's."""
    specs = [job["spec"]["rayClusterSpec"] for job in of_kind(objects, "RayJob")]
    (spec,) = [*specs, *(cluster["spec"] for cluster in of_kind(objects, "RayCluster"))]
    return dict(spec)


def containers(template: Object) -> Iterator[Object]:
    yield from template["spec"].get("initContainers", [])
    yield from template["spec"]["containers"]


def all_containers(objects: tuple[Object, ...]) -> Iterator[Object]:
    for template in templates(objects).values():
        yield from containers(template)


def selects(selector: Object, template: Object) -> bool:
    labels = template["metadata"]["labels"]
    plain = selector.get("matchLabels", {} if "matchExpressions" in selector else selector)
    return all(labels.get(k) == v for k, v in plain.items()) and all(
        {"In": labels.get(e["key"]) in e["values"], "NotIn": labels.get(e["key"]) not in e["values"]}[e["operator"]]
        for e in selector.get("matchExpressions", [])
    )


def parsed(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The command's name and its options, as autofit's own command line reads them; raises for what it refuses."""
    command: Any = typer.main.get_command(app)
    path: list[str] = []
    while hasattr(command, "commands"):
        path.append(arguments[0])
        command, arguments = command.commands[arguments[0]], arguments[1:]
    return " ".join(path), command.make_context(path[-1], list(arguments)).params


def words(shell_text: str, environment: dict[str, str]) -> list[str]:
    """The words that a shell makes of a command."""
    done = subprocess.run(
        ["/bin/bash", "-ce", f"printf '%s\\0' {shell_text}"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split("\0")[:-1]


def search_options(objects: tuple[Object, ...]) -> dict[str, str]:
    """The environment that the submitter has of its ConfigMaps, of which a later one wins."""
    (submitter,) = templates(objects)["ray-submitter"]["spec"]["containers"]
    names = [source["configMapRef"]["name"] for source in submitter["envFrom"]]
    return {k: v for name in names for k, v in the(objects, "ConfigMap", name)["data"].items()}


def search_words(objects: tuple[Object, ...], **changed: str) -> list[str]:
    """What runs on the head: KubeRay's submitter expands the entrypoint, and Ray gives it to a shell once more."""
    submitted = words(ray_job(objects)["spec"]["entrypoint"], {**search_options(objects), **changed})
    shell, flag, script, *arguments = words(shlex.join(submitted), {})
    assert (shell, flag) == ("sh", "-c") and script.startswith("autofit ")
    return ["autofit", *arguments]


def test_every_file_is_part_of_something() -> None:
    """A manifest that no kustomization names would never be applied."""
    folders = [file.parent for file in K8S.rglob("kustomization.yaml")]
    assert {folder.name for folder in K8S.iterdir() if folder.is_dir()} == {
        folder.relative_to(K8S).parts[0] for folder in folders
    }
    for folder in folders:
        text = (folder / "kustomization.yaml").read_text()
        for file in folder.iterdir():
            assert file.name == "kustomization.yaml" or file.name in text, file


def test_every_overlay_is_tested() -> None:
    assert {f"overlays/{folder.name}" for folder in (K8S / "overlays").iterdir()} == {*SEARCHES, SERVICE}


def test_every_object_has_namespace_and_labels(objects: tuple[Object, ...]) -> None:
    namespace = yaml.safe_load((K8S / "namespace.yaml").read_text())["metadata"]["name"]
    for o in objects:
        assert o["metadata"]["namespace"] == namespace, o["metadata"]["name"]
        assert o["metadata"]["labels"][PART] == "autofit", o["metadata"]["name"]
    for template in templates(objects).values():
        assert template["metadata"]["labels"][PART] == "autofit"


def test_deleting_a_variant_leaves_the_measurements(objects: tuple[Object, ...]) -> None:
    assert not of_kind(objects, "Namespace") and not of_kind(objects, "PersistentVolumeClaim")
    policy = the(objects, "StatefulSet", "autofit-postgres")["spec"].get("persistentVolumeClaimRetentionPolicy", {})
    assert policy.get("whenDeleted", "Retain") == "Retain"


def test_pods_meet_the_restricted_standard(objects: tuple[Object, ...]) -> None:
    for template in templates(objects).values():
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] >= 999
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert not pod.get("hostNetwork") and not pod.get("hostPID")
        assert not any("hostPath" in volume for volume in pod.get("volumes", []))
        for container in containers(template):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert not {"privileged", "runAsUser", "runAsNonRoot"} & set(own)


def test_roots_are_read_only_with_room_for_scratch(objects: tuple[Object, ...]) -> None:
    for component, template in templates(objects).items():
        for container in containers(template):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, (component, container["name"])
            if container["image"].startswith("autofit"):
                mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
                assert {"/tmp", "/home/autofit"} <= mounted, (component, container["name"])
    assert ray_cluster(objects)["autoscalerOptions"]["securityContext"]["readOnlyRootFilesystem"] is True


def test_containers_say_what_they_need(objects: tuple[Object, ...]) -> None:
    for container in all_containers(objects):
        assert {"cpu", "memory"} <= set(container["resources"]["requests"]), container["name"]
        assert "memory" in container["resources"]["limits"], container["name"]


def test_mounts_have_their_volumes(objects: tuple[Object, ...]) -> None:
    claims = the(objects, "StatefulSet", "autofit-postgres")["spec"]["volumeClaimTemplates"]
    claimed = {claim["metadata"]["name"] for claim in claims}
    for component, template in templates(objects).items():
        volumes = {v["name"] for v in template["spec"].get("volumes", [])}
        volumes |= claimed if component == "store" else set()
        mounted = {m["name"] for c in containers(template) for m in c.get("volumeMounts", [])}
        if component == "ray-head":  # KubeRay adds the autoscaler to its pod
            mounted |= {m["name"] for m in ray_cluster(objects)["autoscalerOptions"]["volumeMounts"]}
        assert mounted == volumes, component


def test_images_are_of_one_version_and_others_of_one_digest(objects: tuple[Object, ...]) -> None:
    for container in all_containers(objects):
        name, _, digest = container["image"].partition("@")
        image, _, tag = name.rpartition(":")
        assert re.fullmatch(r"\d+\.\d+(\.\d+)?", tag), container["image"]
        if image == "autofit-llm":
            assert tag == __version__
        else:
            assert re.fullmatch(r"sha256:[0-9a-f]{64}", digest), container["image"]
    assert len({c["image"] for c in all_containers(objects)}) == 2


def test_commands_are_autofits_own(objects: tuple[Object, ...], variant: str) -> None:
    options_by_command = {}
    for container in all_containers(objects):
        text = " ".join(container.get("command", []))
        for line in re.findall(r"(?:^|until |exec )autofit ([^;|]+)", text, re.MULTILINE):
            name, options = parsed(line.split())
            options_by_command[name] = options
    more = {SERVICE: {"runner"}, "everything": {"db export"}}.get(variant, set())
    assert set(options_by_command) == {"serve", "db check", "db upgrade", *more}
    assert options_by_command["serve"]["host"] == "0.0.0.0"


def test_all_that_opens_the_store_waits_for_its_schema(objects: tuple[Object, ...], tmp_path: Path) -> None:
    wait, migrate = (c for c in containers(templates(objects)["migrate"]))
    assert "pg_isready" in wait["command"][-1] and migrate["command"] == ["autofit", "db", "upgrade"]
    first = {templates(objects)[component]["spec"]["initContainers"][0]["command"][-1] for component in OPENING}
    assert first == {"until autofit db check --schema; do sleep 5; done"}


def test_the_schema_is_there_when_the_job_has_run(tmp_path: Path) -> None:
    def run(*words: str) -> int:
        environment = {**os.environ, "AUTOFIT_STORE": str(tmp_path / "store.db")}
        return subprocess.run([f"{BESIDE_PYTHON}/autofit", *words], env=environment, capture_output=True).returncode

    wait = ("db", "check", "--schema")
    assert [run(*wait), run("db", "upgrade"), run(*wait)] == [4, 0, 0]


def test_the_search_is_one_that_autofit_takes(searching: str) -> None:
    objects = render(searching)
    program, *arguments = search_words(objects)
    assert program == "autofit"
    name, options = parsed(arguments)
    assert name == "search"
    assert options["model"] in models.names()
    assert options["space"] is None or options["space"] in space.names()
    assert options["hardware"] in ("auto", *(card.name for card in hardware.cards()))
    assert options["method"] in ("any", *METHODS)
    assert options["allow"] in {effect.label for effect in Effect}
    assert options["memory_limit"] is None or parse_bytes(options["memory_limit"]) > 0
    assert options["device"] == ("cpu" if searching == "overlays/cpu-smoke" else "cuda")
    assert options["ray_address"] == "auto"
    assert options["as_json"] is True
    assert options["store"] is None, "the store's URL holds a password: it is in the environment alone"
    assert options["fresh"] is False, "a retry must go on from the store"


@pytest.mark.parametrize("code", [0, 2, 3, 4, 130])
def test_that_nothing_fits_is_no_failure_of_the_job(code: int, tmp_path: Path) -> None:
    entrypoint = ray_job(render("overlays/h100"))["spec"]["entrypoint"]
    program = tmp_path / "autofit"
    program.write_text(f'#!/bin/sh\ntest "$1 $2" = "search --model" || exit 99\nexit {code}\n')
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    ended = subprocess.run(["sh", "-c", entrypoint], env={"PATH": path, "MODEL": "m"}).returncode
    assert ended == 0 if code in (0, 3) else ended != 0


def test_an_option_left_empty_is_left_out_and_a_space_does_no_harm(searching: str) -> None:
    objects = render(searching)
    _, options = parsed(search_words(objects, MEMORY_LIMIT="24 GiB", TIME_BUDGET="", MAX_TRIALS="7")[1:])
    assert options["memory_limit"] == "24 GiB"
    assert options["time_budget"] == parsed(["search", "--model", "m"])[1]["time_budget"]
    assert options["max_trials"] == 7


def test_every_option_of_search_env_is_used(searching: str) -> None:
    objects = render(searching)
    used = set(re.findall(r"\$\{(\w+)", ray_job(objects)["spec"]["entrypoint"]))
    assert set(search_options(objects)) == used


def test_search_env_has_every_option_but_those_that_the_readme_names() -> None:
    command: Any = typer.main.get_command(app)
    options = {p.opts[0].removeprefix("--") for p in command.commands["search"].params}
    given = {name.lower().replace("_", "-") for name in search_options(render("overlays/h100"))}
    of_the_cluster = {"ray-address", "store", "json", "dry-run", "in-place", "price", "prices"}
    assert options - given == {*of_the_cluster, "fresh"}
    told = " ".join(README[README.index("`k8s/components/search/search.env` has") :].split("\n\n")[0].split())
    assert "measuring afresh" in told


def test_a_search_keeps_its_options_when_others_are_applied() -> None:
    names = [o["metadata"]["name"] for variant in SEARCHES for o in of_kind(render(variant), "ConfigMap")]
    own = [name for name in names if not name.startswith("autofit-search-defaults-")]
    assert len(set(own)) == len(SEARCHES) == len(own) and len(set(names)) == len(own) + 1


def test_the_ray_job_resumes_and_cleans_up(searching: str) -> None:
    objects = render(searching)
    job = ray_job(objects)
    spec = job["spec"]
    assert job["apiVersion"] == "ray.io/v1"
    assert job["metadata"]["name"] == SEARCHES[searching]
    assert spec["backoffLimit"] >= 1
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["ttlSecondsAfterFinished"] > 0
    budget = parse_duration(parsed(search_words(objects)[1:])[1]["time_budget"])
    assert spec["activeDeadlineSeconds"] >= budget + 3600


def test_trials_land_on_workers_alone(objects: tuple[Object, ...], variant: str) -> None:
    cluster = ray_cluster(objects)
    head = cluster["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    for container in head["template"]["spec"]["containers"]:
        assert "nvidia.com/gpu" not in container["resources"]["limits"]
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        (worker,) = group["template"]["spec"]["containers"]
        assert worker["resources"]["limits"].get("nvidia.com/gpu") == (None if variant == "overlays/cpu-smoke" else 1)
        # By default Ray's workers give way to everything else on the machine, timed steps included.
        assert {"name": "RAY_worker_niceness", "value": "0"} in worker["env"]
    for template in (head["template"], *(group["template"] for group in cluster["workerGroupSpecs"])):
        mount = {m["mountPath"]: m["name"] for m in template["spec"]["containers"][0]["volumeMounts"]}
        shared = {v["name"]: v["emptyDir"] for v in template["spec"]["volumes"] if "emptyDir" in v}[mount["/dev/shm"]]
        assert shared["medium"] == "Memory"
        assert shared["sizeLimit"]


def test_nodes_with_a_search_are_not_taken_to_save_them(objects: tuple[Object, ...]) -> None:
    cluster = ray_cluster(objects)
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        stays = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
        assert stays.items() <= group["template"]["metadata"]["annotations"].items()


def test_what_has_replicas_is_spread_and_loses_one_at_a_time(objects: tuple[Object, ...]) -> None:
    budgets = of_kind(objects, "PodDisruptionBudget")
    for o in of_kind(objects, "Deployment"):
        template = o["spec"]["template"]
        (budget,) = (b["spec"] for b in budgets if selects(b["spec"]["selector"], template))
        assert budget["maxUnavailable"] == 1 < o["spec"]["replicas"]
        spread = template["spec"]["topologySpreadConstraints"]
        assert {s["topologyKey"] for s in spread} == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
        assert all(selects(s["labelSelector"], template) for s in spread)


def test_each_card_has_a_group_of_workers_that_starts_from_no_node() -> None:
    spec = ray_cluster(render("everything"))
    assert spec["enableInTreeAutoscaling"] is True
    pods = {}
    for group in spec["workerGroupSpecs"]:
        card = hardware.card(group["groupName"])
        assert group["labels"] == {HARDWARE_LABEL: card.name} and group["replicas"] == group["minReplicas"] == 0
        pods[card.name] = copy.deepcopy(group["template"])
        product = pods[card.name]["spec"].pop("nodeSelector")["nvidia.com/gpu.product"]
        assert hardware.matching_cards(product.replace("-", " ")) == (card,)
        resources = pods[card.name]["spec"]["containers"][0].pop("resources")
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert set(pods) == set(CARDS) and all(pod == pods[CARDS[0]] for pod in pods.values())


def test_components_in_an_order_that_would_lose_them_are_refused() -> None:
    for components in (("search", "gpu/l40s"), ("gpu/l40s", "kueue", "search")):
        with pytest.raises(AssertionError, match=r"nothing selected by RayCluster|no matches for Id RayJob"):
            overlay(*components)


def test_the_runner_shares_what_a_driver_reaches_ray_by() -> None:
    spec = ray_cluster(render(SERVICE))
    template = spec["headGroupSpec"]["template"]
    (head,), (*_, runner) = template["spec"]["containers"], template["spec"]["initContainers"]
    assert (head["name"], runner["name"]) == ("ray-head", "runner")
    assert template["spec"]["shareProcessNamespace"] is True, "Ray looks for its node among the processes"
    assert runner["volumeMounts"] == head["volumeMounts"]
    assert {"/tmp/ray", "/dev/shm"} <= {mount["mountPath"] for mount in head["volumeMounts"]}
    given = {variable["name"]: variable for variable in runner["env"]}
    assert given["RAY_AUTH_MODE"]["value"] == spec["authOptions"]["mode"]
    (cluster,) = of_kind(render(SERVICE), "RayCluster")
    # The secret that KubeRay makes for a cluster, and its one key.
    secret = {"name": cluster["metadata"]["name"], "key": "auth_token"}
    assert given["RAY_AUTH_TOKEN"]["valueFrom"] == {"secretKeyRef": secret}
    # The autoscaler alone has the pod's service account.
    (mount,) = spec["autoscalerOptions"]["volumeMounts"]
    assert mount["mountPath"] == "/var/run/secrets/kubernetes.io/serviceaccount"
    assert mount["name"] not in {m["name"] for c in containers(template) for m in c.get("volumeMounts", [])}


def test_another_image_replaces_the_pods_of_the_service() -> None:
    """Only a RayCluster of its own may say so: KubeRay refuses it within a RayJob."""
    assert ray_cluster(render(SERVICE))["upgradeStrategy"] == {"type": "Recreate"}
    assert all("upgradeStrategy" not in ray_cluster(render(variant)) for variant in SEARCHES)


def test_a_search_asks_for_all_that_a_group_may_have() -> None:
    """A group starts from no node: without a number a search would ask for one."""
    spec = ray_cluster(render(SERVICE))
    (runner,) = (c for c in spec["headGroupSpec"]["template"]["spec"]["initContainers"] if c["name"] == "runner")
    _, options = parsed(runner["command"][-1].partition("exec autofit ")[2].split())
    assert {group["maxReplicas"] for group in spec["workerGroupSpecs"]} == {options["workers"]}
    for searching in SEARCHES:
        (group,) = ray_cluster(render(searching))["workerGroupSpecs"]
        assert parsed(search_words(render(searching))[1:])[1]["workers"] == group["maxReplicas"]


def test_a_runner_that_ends_is_started_again() -> None:
    """The pod's own policy is Never, as KubeRay's second autoscaler asks: only a sidecar may have one of its own."""
    head = templates(render(SERVICE))["ray-head"]["spec"]
    again = {c["name"] for c in head["initContainers"] if c.get("restartPolicy") == "Always"}
    assert again == {"runner"} and [c["name"] for c in head["containers"]] == ["ray-head"]


def times(count: int, amount: str | int) -> str | int:
    """So many times an amount as Kubernetes writes it."""
    if isinstance(amount, int):
        return count * amount
    digits = amount.rstrip("Gi")
    return f"{count * int(digits)}{amount.removeprefix(digits)}"


def test_a_pod_may_have_the_eight_gpus_of_a_machine() -> None:
    alone, eight = (
        ray_cluster(overlay("gpu/l40s", "gpu/h100-80g", *more, "runner"))["workerGroupSpecs"]
        for more in ((), ("eight-gpus",))
    )
    assert alone[1] == eight[1] and eight[1]["groupName"] == "l40s", "only the card before it"
    group, one = eight[0], alone[0]["template"]["spec"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] == 1
    pod = group["template"]["spec"]
    for kind in ("requests", "limits"):
        asked = {name: times(8, amount) for name, amount in one["containers"][0]["resources"][kind].items()}
        assert pod["containers"][0]["resources"][kind] == asked
    (shared,) = (v["emptyDir"] for v in pod["volumes"] if v["name"] == "shm")
    assert shared == {"medium": "Memory", "sizeLimit": "64Gi"}


def test_kueue_has_a_quota_for_each_card() -> None:
    objects = render("everything")
    job, (queue,), (cluster_queue,) = (
        ray_job(objects), of_kind(objects, "LocalQueue"), of_kind(objects, "ClusterQueue")
    )  # fmt: skip
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == queue["metadata"]["name"]
    assert queue["spec"]["clusterQueue"] == cluster_queue["metadata"]["name"]
    (resources,) = cluster_queue["spec"]["resourceGroups"]
    first, *others = resources["flavors"]
    nodes = {o["metadata"]["name"]: o.get("spec", {}).get("nodeLabels") for o in of_kind(objects, "ResourceFlavor")}
    # A pod gets the first flavor that has room and does not contradict its nodeSelector: a head none with a card.
    assert nodes[first["name"]] is None and first["resources"][-1] == {"name": "nvidia.com/gpu", "nominalQuota": 0}
    groups = ray_cluster(objects)["workerGroupSpecs"]
    assert {name: nodes[name] for name in (flavor["name"] for flavor in others)} == {
        f"autofit-{group['groupName']}": group["template"]["spec"]["nodeSelector"] for group in groups
    }
    covered = resources["coveredResources"]
    assert all([r["name"] for r in flavor["resources"]] == covered for flavor in resources["flavors"])


def test_a_nightly_backup_is_whole_and_the_readme_restores_it(tmp_path: Path) -> None:
    pod = templates(render("everything"))["backup"]["spec"]
    assert f"name: {pod['volumes'][0]['persistentVolumeClaim']['claimName']}\n" in README
    (container,) = pod["containers"]
    backup, store = tmp_path / "backup", tmp_path / "store.db"
    backup.mkdir()
    for day in range(1, 20):
        older = backup / f"trials-2026-01-{day:02}.jsonl.gz"
        older.touch()
        os.utime(older, (day, day))
    put(store, filled=True)

    def run(script: str, url: Path) -> str:
        environment = {**os.environ, "PATH": f"{BESIDE_PYTHON}:{os.environ['PATH']}", "AUTOFIT_STORE": str(url)}
        text = script.replace("/backup", str(backup))
        return subprocess.run(
            ["bash", "-ec", text], env=environment, capture_output=True, text=True, check=True
        ).stdout  # fmt: skip

    run(container["command"][-1], store)
    kept = sorted(file.name for file in backup.iterdir())
    assert len(kept) == 14 and kept[0] == "trials-2026-01-07.jsonl.gz", "two weeks"
    (restore,) = re.findall(r'command\[2\] =\s+"(.* /backup/\S+ \| autofit db import -)"', README)
    restore = restore.replace("trials-DAY.jsonl.gz", kept[-1])
    run(restore, tmp_path / "restored.db")
    whole = run("autofit db export -", store)
    assert whole and run("autofit db export -", tmp_path / "restored.db") == whole
    os.truncate(backup / kept[-1], (backup / kept[-1]).stat().st_size - 8)  # gzip's checksum, and no trial
    with pytest.raises(subprocess.CalledProcessError):
        run(restore, tmp_path / "of a damaged one.db")


def test_a_postgresql_of_ones_own_takes_the_place_of_ours() -> None:
    ours, own = overlay("gpu/l40s", "runner"), overlay("gpu/l40s", "runner", "external-postgres")
    left_out = [o for o in ours if o not in own]
    assert [o for o in own if o not in ours] == []
    assert {(o["kind"], o["metadata"]["name"]) for o in left_out} == {
        ("StatefulSet", "autofit-postgres"), ("Service", "autofit-postgres"), ("NetworkPolicy", "autofit-store")
    }  # fmt: skip


def test_sizes_are_those_that_the_docs_state() -> None:
    page = (ROOT / "docs" / "admin" / "sizes.md").read_text()
    stated = {row[0]: row[1:] for row in re.findall(r"^\| `([\w-]+)`[^|]*\| (\S+) \| (\S+) \| (\S+) \|", page, re.M)}
    assert stated.keys() == {"postgres", "api", "ray-head", "runner", "ray-worker"}
    resources = {container["name"]: container["resources"] for container in all_containers(render(SERVICE))}
    for name, sizes in stated.items():
        requests, most = resources[name]["requests"], resources[name]["limits"]["memory"]
        assert sizes == (requests["cpu"], requests["memory"], most), name


def test_the_image_has_compiled_what_offloading_needs() -> None:
    builder, runtime = (K8S / "Dockerfile").read_text().split("\nFROM ")[1:]
    (compile_,) = re.findall(r"autofit (doctor [^&]*)&&", builder)
    options = parsed(compile_.split())[1]
    assert options["build_ops"] and options["portable"] and options["device"] == "cpu"
    (folder,) = {re.findall(r"TORCH_EXTENSIONS_DIR=(\S+)", stage)[0] for stage in (builder, runtime)}
    (copied,) = re.findall(r"^COPY --from=builder (\S+) \1$", runtime, re.MULTILINE)
    assert folder.startswith(f"{copied}/")
    packages = [
        set(re.findall(r"apt-get install -y --no-install-recommends ([^\\]+)", s)[0].split())
        for s in (builder, runtime)
    ]
    assert packages == [{"g++", "libaio-dev"}, {"g++", "libaio1"}]


def test_the_base_of_the_image_is_pinned() -> None:
    dockerfile = (K8S / "Dockerfile").read_text()
    assert re.findall(r"^ARG BASE_IMAGE=\S+@sha256:[0-9a-f]{64}$", dockerfile, re.MULTILINE)
    assert re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE) == ["${BASE_IMAGE}"] * 2


def test_ray_asks_for_a_token(objects: tuple[Object, ...]) -> None:
    assert ray_cluster(objects)["authOptions"] == {"mode": "token"}


def test_kuberays_head_service_finds_the_head(objects: tuple[Object, ...]) -> None:
    for component in ("ray-head", "ray-worker"):
        labels = templates(objects)[component]["metadata"]["labels"]
        assert not {NAME, "app.kubernetes.io/created-by"} & set(labels), "KubeRay's Service selects its own values"


def test_ray_is_the_pinned_one(objects: tuple[Object, ...]) -> None:
    constraints = ROOT / "constraints.txt"
    pinned = metadata.version("ray")
    if constraints.exists():
        (pinned,) = re.findall(r"^ray(?:\[\w+\])?==(\S+)", constraints.read_text(), re.MULTILINE)
    assert ray_cluster(objects)["rayVersion"] == pinned


def test_variables_are_those_that_autofit_reads(objects: tuple[Object, ...]) -> None:
    read_by = {
        "api": {ENVIRONMENT, TOKEN_VARIABLE},
        **{component: {ENVIRONMENT} for component in ("ray-head", "migrate", "backup")},
    }
    for component, template in templates(objects).items():
        given = {e["name"] for c in containers(template) for e in c.get("env", []) if e["name"].startswith("AUTOFIT")}
        assert given == read_by.get(component, set()), component


def test_secrets_are_referenced_and_the_readme_makes_them(objects: tuple[Object, ...]) -> None:
    assert not of_kind(objects, "Secret")
    wanted = set()
    for container in all_containers(objects):
        for variable in container.get("env", []):
            if re.search("STORE|TOKEN|PASSWORD", variable["name"]):
                reference = variable["valueFrom"]["secretKeyRef"]
                if reference["name"] == "autofit-ray":
                    continue  # which KubeRay makes
                assert reference["key"] == variable["name"]
                wanted.add((reference["name"], reference["key"]))
    made = set()
    for name, body in re.findall(
        r"create secret generic (\S+) --from-env-file=/dev/stdin[^\n]*\n(.*?)EOF", README, re.S
    ):
        made |= {(name, line.partition("=")[0]) for line in body.splitlines()}
    assert made == wanted


def test_the_stores_url_is_that_of_the_server(objects: tuple[Object, ...]) -> None:
    (url,) = set(re.findall(r"^AUTOFIT_STORE=(\S+)$", README, re.MULTILINE))
    address = Address.of(url.replace("$password", "secret")).url
    server = the(objects, "StatefulSet", "autofit-postgres")["spec"]
    (container,) = server["template"]["spec"]["containers"]
    values = {e["name"]: e.get("value") for e in container["env"]}
    assert (address.username, address.database) == (values["POSTGRES_USER"], values["POSTGRES_DB"])
    (mount,) = (m["mountPath"] for m in container["volumeMounts"] if m["name"] == "data")
    assert values["PGDATA"].startswith(f"{mount}/")
    service = the(objects, "Service", address.host or "")
    assert service["metadata"]["name"] == server["serviceName"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["ports"][0]["port"] == address.port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["exec"]["command"][0] == "pg_isready"


def test_the_server_has_a_connection_for_whoever_asks() -> None:
    with closing(Database(Address.of("postgresql://autofit@localhost/autofit"))) as database:
        pool: Any = database.engine.pool
        each = pool.size() + pool._max_overflow
    objects = render(SERVICE)
    (container,) = the(objects, "StatefulSet", "autofit-postgres")["spec"]["template"]["spec"]["containers"]
    (most,) = re.findall(r"max_connections=(\d+)", " ".join(container["args"]))
    api = the(objects, "Deployment", "autofit-api")["spec"]
    assert "strategy" not in api, "so a rollout adds a quarter of the servers"
    servers = api["replicas"] + math.ceil(api["replicas"] / 4)
    runner, drivers = 1, 3  # a search over several kinds of card has a driver for each
    assert int(most) >= (servers + runner + drivers) * each + 3, "three are kept for superusers"


def test_services_reach_their_pods(objects: tuple[Object, ...]) -> None:
    for service in of_kind(objects, "Service"):
        chosen = [t for t in templates(objects).values() if selects(service["spec"]["selector"], t)]
        assert len(chosen) == 1
        named = {p["name"]: p["containerPort"] for c in containers(chosen[0]) for p in c.get("ports", [])}
        for port in service["spec"]["ports"]:
            assert named[port["targetPort"]] == port["port"]


def test_probes_ask_what_the_api_answers_without_a_token(objects: tuple[Object, ...], tmp_path: Path) -> None:
    (container,) = templates(objects)["api"]["spec"]["containers"]
    _, options = parsed(container["command"][1:])
    assert {p["name"]: p["containerPort"] for p in container["ports"]} == {"http": options["port"]}
    probes = [container[probe]["httpGet"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert [probe["path"] for probe in probes] == ["/healthz", "/readyz", "/healthz"]
    assert {probe["port"] for probe in probes} == {"http"}
    from fastapi.testclient import TestClient

    with Store.open(str(tmp_path / "store.db")) as store, TestClient(create_app(store, token="t")) as client:
        assert [client.get(probe["path"]).status_code for probe in probes] == [200] * 3
        assert client.get("/v1/trials").status_code == 401


@pytest.mark.parametrize(
    ("policy", "allowed"),
    [
        ("autofit-store", {"api", "ray-head", "migrate", "backup"}),
        ("autofit-ray", {"ray-head", "ray-worker", "ray-submitter"}),
    ],
)
def test_only_who_needs_them_reaches_store_and_ray(objects: tuple[Object, ...], policy: str, allowed: set[str]) -> None:
    spec = the(objects, "NetworkPolicy", policy)["spec"]
    pods = templates(objects)
    protected = {component for component, template in pods.items() if selects(spec["podSelector"], template)}
    assert protected == ({"store"} if policy == "autofit-store" else {"ray-head", "ray-worker"})
    sources = [peer for rule in spec["ingress"] for peer in rule["from"] if "namespaceSelector" not in peer]
    assert {c for c, t in pods.items() if any(selects(s["podSelector"], t) for s in sources)} == allowed & set(pods)


def test_nobody_is_reached_but_by_a_rule(objects: tuple[Object, ...]) -> None:
    """Beside those of the store and of Ray there is one, for the API."""
    for component, template in templates(objects).items():
        own = [o["spec"] for o in of_kind(objects, "NetworkPolicy") if selects(o["spec"]["podSelector"], template)]
        entering = [spec for spec in own if "Ingress" in spec["policyTypes"]]
        assert entering, f"{component} may be reached by anything"
        rules = [rule for spec in entering for rule in spec.get("ingress", [])]
        if component not in ("store", "ray-head", "ray-worker"):
            assert rules == ([{"ports": [{"port": 8000}]}] if component == "api" else []), component


def test_only_who_needs_it_reaches_anything_outside(objects: tuple[Object, ...]) -> None:
    """The store begins no connection. All others reach what is autofit's, and trials nothing else."""
    outside = {53, 443, 6443, 5432}
    allowed = {"ray-worker": {53}, "ray-submitter": {53}}
    for component, template in templates(objects).items():
        own = [o["spec"] for o in of_kind(objects, "NetworkPolicy") if selects(o["spec"]["podSelector"], template)]
        leaving = [spec for spec in own if "Egress" in spec["policyTypes"]]
        assert leaving, f"{component} may reach anything"
        rules = [rule for spec in leaving for rule in spec.get("egress", [])]
        inside = [rule for rule in rules if rule.get("to") == [{"podSelector": {"matchLabels": {PART: "autofit"}}}]]
        ports = {port["port"] for rule in rules if "to" not in rule for port in rule["ports"]}
        assert len(inside) == (component != "store") and all("to" not in r for r in rules if r not in inside), component
        assert ports == (set() if component == "store" else allowed.get(component, outside)), component


def test_the_image_is_built_from_files_that_are_there(objects: tuple[Object, ...]) -> None:
    dockerfile = (K8S / "Dockerfile").read_text()
    ignored = (K8S / "Dockerfile.dockerignore").read_text().split()
    copied = {name for line in re.findall(r"^COPY ([^-].*) \S+$", dockerfile, re.MULTILINE) for name in line.split()}
    assert ignored[0] == "*"
    assert {entry[1:] for entry in ignored if entry.startswith("!")} == copied
    assert [name for name in sorted(copied) if not (ROOT / name).exists()] == []
    assert "latest" not in dockerfile
    (user,) = re.findall(r"^USER (\d+):", dockerfile, re.MULTILINE)
    runs_as = {t["spec"]["securityContext"]["runAsUser"] for c, t in templates(objects).items() if c != "store"}
    assert runs_as == {int(user)}


def test_no_package_index_is_named() -> None:
    """Which index torch comes from is for who builds to say, as for `make install`."""
    dockerfile = (K8S / "Dockerfile").read_text()
    assert re.findall(r"^ARG TORCH_INDEX=(.*)$", dockerfile, re.MULTILINE) == [""]
    assert not re.search(r"https?://", dockerfile)
    assert re.findall(r"TORCH_INDEX=(\S+)", README) == ['"$TORCH_INDEX"']


def test_the_readme_names_what_exists(objects: tuple[Object, ...]) -> None:
    for path in re.findall(r"k8s/[\w./-]*\w", README):
        assert (ROOT / path).exists(), path
    for overlay in (K8S / "overlays").iterdir():
        assert f"kubectl apply -k k8s/overlays/{overlay.name}\n" in README
    assert set(re.findall(r"\b(?:job|rayjob)[ /](autofit-\w+)", README)) <= {
        *SEARCHES.values(),
        "autofit-migrate",
        "autofit-restore",
    }
    assert f"autofit-llm:{__version__}" in README
