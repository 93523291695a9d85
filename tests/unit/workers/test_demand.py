"""What a pool asks of Ray, on which nodes, and how much of it there is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from autofit.catalog.hardware import card
from autofit.core.errors import EnvironmentLacks
from autofit.operations import SearchRequest, WorkloadOptions, search_over_hardware
from autofit.workers.cluster import offer
from autofit.workers.cluster.demand import DeviceRequest, check_capacity
from autofit.workers.cluster.nodes import HARDWARE_LABEL, NODE_LABEL, TYPE_LABEL, Node


def node(
    node_id: str,
    *types: str,
    cpus: float = 16,
    gpus: float = 0,
    free_cpus: float | None = None,
    free_gpus: float | None = None,
    hardware: str | None = None,
    is_type_resource: bool = True,
) -> Node:
    """A node whose resources are free unless it is said otherwise."""
    return Node(
        node_id=node_id,
        host=node_id,
        cpus=cpus,
        gpus=gpus,
        free_cpus=cpus if free_cpus is None else free_cpus,
        free_gpus=gpus if free_gpus is None else free_gpus,
        hardware=hardware,
        types=frozenset(types),
        is_type_resource=is_type_resource,
    )


H100 = node("h", "H100", gpus=8)
A100 = node("a", "A100", gpus=4)
HEAD = node("head", cpus=0)


def test_what_others_use_and_gpus_of_other_kinds_are_no_room() -> None:
    busy = node("b", "H100", gpus=8, free_gpus=3)
    nodes = [HEAD, H100, A100, busy]
    any_gpu, h100 = (DeviceRequest(ranks=1, uses_gpus=True, card=c) for c in (None, card("h100-80g")))
    assert (any_gpu.room(nodes), any_gpu.capacity(nodes)) == (15, 20)
    assert (h100.room(nodes), h100.capacity(nodes)) == (11, 16)
    assert DeviceRequest(ranks=4, uses_gpus=True, card=card("h100-80g")).room(nodes) == 2
    h100.left_out.add("h")
    assert h100.room(nodes) == 3
    few = node("f", "H100", cpus=4, gpus=8, free_cpus=1.0)
    assert h100.room([few]) == 2, "each asks for half of a CPU there"
    assert DeviceRequest(ranks=1, uses_gpus=False).room([HEAD, H100, A100], used=["h"]) == 1


def test_a_trial_is_spread_over_machines_only_where_none_has_as_many_devices() -> None:
    four, six = (DeviceRequest(ranks=ranks, uses_gpus=True) for ranks in (4, 6))
    small = [node(name, gpus=4, free_gpus=3) for name in "xyz"]
    assert (four.demand(small).strategy, four.room(small), four.capacity(small)) == ("STRICT_PACK", 0, 3)
    assert (six.demand(small).strategy, six.room(small), six.capacity(small)) == ("PACK", 1, 2)
    assert six.demand([*small, H100]).strategy == "STRICT_PACK"
    assert six.demand([HEAD]).strategy == "PACK", "whatever an autoscaler adds"
    four.is_packed, six.is_packed = True, False
    assert (four.demand([HEAD]).strategy, six.demand([H100]).strategy) == ("STRICT_PACK", "PACK"), "as trials before"


@pytest.mark.parametrize(
    ("name", "nodes", "bundle", "selector"),
    [
        (None, [H100, A100], {}, {}),
        ("h100-80g", [HEAD, H100, A100], {"accelerator_type:H100": 0.001}, {}),
        ("h100-80g", [HEAD], {}, {HARDWARE_LABEL: "h100-80g"}),
        ("h100-80g", [H100, node("l", "H100", gpus=1, is_type_resource=False)], {}, {TYPE_LABEL: "H100"}),
        ("h100-80g", [H100, node("l", "H100", gpus=1, hardware="h100-80g")], {}, {HARDWARE_LABEL: "h100-80g"}),
        (
            "h100-80g",
            [
                H100,
                node("l", "H100", gpus=1, free_gpus=0, hardware="h100-80g"),
                node("p", "H100", gpus=1, hardware="h100-pcie-80g"),
            ],
            {"accelerator_type:H100": 0.001},
            {NODE_LABEL: "!in(p)"},
        ),
        (
            "rtx-4090",
            [node("c", gpus=1), node("l", gpus=1, free_cpus=0, hardware="rtx-4090"), A100],
            {},
            {NODE_LABEL: "!in(a)"},
        ),
        ("rtx-4090", [HEAD], {}, {HARDWARE_LABEL: "rtx-4090"}),
        (
            "rtx-4090",
            [node("c", "GeForce-RTX-4090", gpus=1), node("d", "GeForce-RTX-3090", gpus=1)],
            {"accelerator_type:GeForce-RTX-4090": 0.001},
            {},
        ),
        ("rtx-4090", [node("c", gpus=1), A100, H100], {}, {NODE_LABEL: "!in(a,h)"}),
    ],
)
def test_a_card_is_asked_for_by_what_its_nodes_go_by(
    name: str | None, nodes: list[Node], bundle: dict[str, float], selector: dict[str, str]
) -> None:
    wanted = DeviceRequest(ranks=1, uses_gpus=True, card=None if name is None else card(name))
    demand = wanted.demand(nodes)
    assert demand.bundle == {"GPU": 1.0, "CPU": 1.0, **bundle}
    assert demand.selector == selector


def test_an_autoscaler_is_asked_by_the_name_that_it_knows() -> None:
    wanted = DeviceRequest(
        ranks=1, uses_gpus=True, card=card("h100-80g"), addable={"GPU": 8, "accelerator_type:H100": 1}
    )
    assert wanted.demand([HEAD]).bundle["accelerator_type:H100"] == 0.001
    assert wanted.demand([HEAD]).selector == {}


def test_ranks_on_cpus_divide_one_whole_machine_that_no_other_trial_has() -> None:
    wanted = DeviceRequest(ranks=3, uses_gpus=False, left_out={"x"})
    demand = wanted.demand([node("m", cpus=4), node("n", cpus=16), node("x", cpus=8)], used=["m"])
    assert demand.bundle == {"CPU": 5.0} and demand.strategy == "STRICT_PACK"
    assert demand.selector == {NODE_LABEL: "!in(m,x)"}


@pytest.mark.parametrize(
    ("ranks", "gpus", "workers", "message"),
    [
        (3, False, 1, r"--devices 3 asks for more than the 2 cores .*use --devices 2"),
        (9, True, 1, r"--devices 9 asks for more than the 8 GPUs that Ray has .*use --devices 8"),
        (4, True, 3, r"--workers 3 of 4 devices each asks for more than the 8 GPUs .*use --workers 2"),
        (1, False, 2, r"--workers 2 asks for more than the 1 machines .*use --workers 1"),
    ],
)
def test_what_a_machine_can_never_run_is_refused(ranks: int, gpus: bool, workers: int, message: str) -> None:
    there = [node("here", gpus=8 * gpus, cpus=8 if gpus else 2)]
    with pytest.raises(EnvironmentLacks, match=message):
        check_capacity(DeviceRequest(ranks=ranks, uses_gpus=gpus), there, workers)
    check_capacity(DeviceRequest(ranks=1, uses_gpus=gpus), there)


def test_the_kinds_of_card_are_those_that_nodes_say(monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[Node] = []
    monkeypatch.setattr(offer, "connect", lambda address: SimpleNamespace(ray=None, close=lambda: None))
    monkeypatch.setattr(offer, "nodes", lambda ray: there)
    asked = SearchRequest(workload=WorkloadOptions(model="smollm2-135m"), ray_address="auto", device="cpu")
    with pytest.raises(EnvironmentLacks, match=r"no node .* has a GPU"):
        search_over_hardware(asked, ["all"])
    there += [HEAD, node("l", "L40S", gpus=4), node("b", "A100", gpus=1, hardware="a100-80g")]
    assert offer.look_here("auto", "cpu").cards == ("a100-80g", "l40s")
    for other, message in (
        (A100, "a may have a100-40g or a100-80g"),
        (node("x", "Z9", gpus=1), "x has a GPU of a type"),
    ):
        there.append(other)
        assert offer.look_here("auto", "cpu").cards == ("a100-80g", "l40s"), "a runner takes what is known"
        with pytest.raises(EnvironmentLacks, match=f"{message}.*label the node: {HARDWARE_LABEL}=NAME"):
            search_over_hardware(asked, ["all"])
        there.pop()


def test_what_ray_has_instead_is_named() -> None:
    labelled = node("l", "A100", gpus=1, hardware="a100-40g")
    with pytest.raises(EnvironmentLacks, match="Ray has no l40s GPUs: it has H100, a100-40g "):
        check_capacity(DeviceRequest(ranks=1, uses_gpus=True, card=card("l40s")), [HEAD, H100, labelled])
