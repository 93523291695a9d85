"""Renders `k8s/` as `kubectl kustomize` does, as far as it is used there, so that CI without kubectl checks it too.

What it does not know it refuses: nothing in a kustomization is passed over in silence. Where kubectl is at hand, a
test holds this renderer against it.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

KNOWN = {
    *("apiVersion", "kind", "namespace", "resources", "images", "configMapGenerator", "configurations", "labels"),
    "patches",
}


def render(folder: Path) -> list[Object]:
    """The objects of a kustomization. Raises for files that are not there and for what this renderer does not know.

    Names of generated ConfigMaps carry no hash.
    """
    text = yaml.safe_load((folder / "kustomization.yaml").read_text())
    unknown = set(text) - KNOWN
    assert not unknown, f"{folder}: {unknown} is not rendered here"
    objects = [o for name in text["resources"] for o in _resources(folder / name)]
    for generator in text.get("configMapGenerator", []):
        _generate(objects, generator, folder, text.get("namespace"))
    for entry in text.get("patches", []):
        _patch(objects, entry, folder)
    for o in objects:
        if "namespace" in text:
            o["metadata"]["namespace"] = text["namespace"]
        for image in text.get("images", []):
            _set_image(o, image)
        for label in text.get("labels", []):
            _label(o, label)
    for name in text.get("configurations", []):
        _check_references(objects, folder / name)
    return objects


def _resources(path: Path) -> list[Object]:
    if path.is_dir():
        return render(path)
    # Anchors make one object of two places; a patch of one must not change the other.
    return [copy.deepcopy(o) for o in _unshared(path.read_text())]


def _unshared(text: str) -> list[Object]:
    class Loader(yaml.SafeLoader):
        """Builds a new object for each alias."""

    def expanded(node: yaml.Node) -> yaml.Node:
        if isinstance(node, yaml.MappingNode):
            pairs = [(expanded(key), expanded(value)) for key, value in node.value]
            return yaml.MappingNode(node.tag, pairs, node.start_mark, node.end_mark)
        if isinstance(node, yaml.SequenceNode):
            return yaml.SequenceNode(node.tag, [expanded(item) for item in node.value], node.start_mark, node.end_mark)
        return yaml.ScalarNode(node.tag, node.value, node.start_mark, node.end_mark)

    loader = Loader("")
    return [loader.construct_document(expanded(node)) for node in yaml.compose_all(text, Loader) if node is not None]


def _generate(objects: list[Object], generator: Object, folder: Path, namespace: str | None) -> None:
    assert set(generator) <= {"name", "namespace", "behavior", "envs"}, generator
    data = {}
    for file in generator["envs"]:
        for line in (folder / file).read_text().splitlines():
            if line.strip() and not line.startswith("#"):
                key, equals, value = line.partition("=")
                assert equals, f"{folder / file}: {line!r} is no KEY=VALUE"
                data[key] = value
    if generator.get("behavior") == "merge":
        (merged,) = _named(objects, "ConfigMap", generator["name"])
        assert merged["metadata"]["namespace"] == generator.get("namespace", namespace)
        merged["data"].update(data)
        return
    assert not _named(objects, "ConfigMap", generator["name"])
    objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": data})


def _patch(objects: list[Object], entry: Object, folder: Path) -> None:
    assert set(entry) <= {"path", "target", "options"}, entry
    (target,) = _named(objects, entry["target"]["kind"], entry["target"]["name"])
    for step in yaml.safe_load((folder / entry["path"]).read_text()):
        *outer, last = (part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:])
        place: Any = target
        for part in outer:
            place = place[int(part)] if isinstance(place, list) else place[part]
        key: Any = int(last) if isinstance(place, list) else last
        assert step["op"] in ("add", "replace"), step
        assert step["op"] == "add" or key in (range(len(place)) if isinstance(place, list) else place), step["path"]
        assert not (step["op"] == "add" and isinstance(place, list)), step
        place[key] = step["value"]


def _set_image(value: Any, image: Object) -> None:
    if isinstance(value, list):
        for item in value:
            _set_image(item, image)
    elif isinstance(value, dict):
        name = value.get("image")
        if isinstance(name, str) and name.partition(":")[0] == image["name"]:
            value["image"] = f"{image['newName']}:{image['newTag']}"
        for inner in value.values():
            _set_image(inner, image)


def _label(o: Object, label: Object) -> None:
    assert set(label) == {"pairs", "includeTemplates", "fields"}, label
    o["metadata"].setdefault("labels", {}).update(label["pairs"])
    places: list[Any] = []
    if label["includeTemplates"] and o["kind"] in ("Deployment", "StatefulSet"):
        places.append(o["spec"]["template"]["metadata"])
        places += [claim["metadata"] for claim in o["spec"].get("volumeClaimTemplates", [])]
    for field in label["fields"]:
        if field["kind"] == o["kind"]:
            found: list[Any] = [o]
            *outer, last = field["path"].split("/")
            assert last == "labels", field
            for part in outer:
                found = [inner[part.removesuffix("[]")] for inner in found]
                found = [item for inner in found for item in inner] if part.endswith("[]") else found
            places += found
    for place in places:
        place.setdefault("labels", {}).update(label["pairs"])


def _check_references(objects: list[Object], path: Path) -> None:
    """Every name that a listed field holds is an object's."""
    for reference in yaml.safe_load(path.read_text())["nameReference"]:
        names = {o["metadata"]["name"] for o in objects if o["kind"] == reference["kind"]}
        for field in reference["fieldSpecs"]:
            for o in objects:
                if o["kind"] == field["kind"]:
                    found = list(_walk(o, field["path"].split("/")))
                    assert found and set(found) <= names, (field, found, names)


def _walk(value: Any, parts: list[str]) -> list[str]:
    if isinstance(value, list):
        return [found for item in value for found in _walk(item, parts)]
    if not parts:
        return [value]
    return _walk(value[parts[0]], parts[1:]) if parts[0] in value else []


def _named(objects: list[Object], kind: str, name: str) -> list[Object]:
    return [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
