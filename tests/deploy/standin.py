"""Stands in for docker, kubectl and the cluster of `helm install`, to run a page's commands.

    python standin.py docker|helm|kubectl ARGUMENTS...

The chart is rendered by the real Helm (HELM), and a Kustomize base by the real kubectl (KUBECTL).
The folder STANDIN keeps the objects that a cluster would get. A command that names an image, an
object or an address that is not there fails, as it would on a cluster.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(os.environ.get("STANDIN", "."))
Document = dict[str, Any]


def documents() -> list[Document]:
    """Returns every object of the cluster, in the order of its creation."""
    texts = [path.read_text() for path in sorted(HERE.glob("*.yaml"))]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def keep(text: str) -> None:
    """Adds objects to the cluster, once they name nothing that is missing."""
    (HERE / f"{len(list(HERE.glob('*.yaml'))):02}.yaml").write_text(text)
    for document in yaml.safe_load_all(text):
        if document:
            check(document)


def names(kind: str) -> set[str]:
    """Returns the names of the objects of a kind; certificates have secrets of their names."""
    made = {each["metadata"]["name"] for each in documents() if each["kind"] == kind}
    if kind == "Secret":
        made |= {
            each["spec"]["secretName"] for each in documents() if each["kind"] == "Certificate"
        }
    return made


def check(document: Document) -> None:
    """Ends with a message if an object names an image, a ConfigMap or a secret that is missing."""
    for pod in pods_in(document):
        for container in pod["containers"]:
            image = container["image"]
            require(image in pushed(), f"nobody has pushed {image}")
            for source in container.get("envFrom", []):
                name = source["configMapRef"]["name"]
                require(name in names("ConfigMap"), f"there is no ConfigMap {name}")
        volumes = [each for each in pod.get("volumes", []) if "projected" in each]
        for secret in (each["secret"] for it in volumes for each in it["projected"]["sources"]):
            is_there = secret["name"] in names("Secret")
            require(is_there or secret.get("optional"), f"there is no Secret {secret['name']}")
        if volumes and not any(
            each["secret"]["name"] in names("Secret")
            for it in volumes
            for each in it["projected"]["sources"]
        ):
            raise SystemExit("a pod finds none of its secrets")


def pods_in(node: object) -> Iterator[Document]:
    """Yields the specs of pods below `node`."""
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        for value in node.values():
            yield from pods_in(value)
    elif isinstance(node, list):
        for value in node:
            yield from pods_in(value)


def pushed() -> list[str]:
    path = HERE / "images"
    return path.read_text().split() if path.exists() else []


def require(is_so: object, message: str) -> None:
    if not is_so:
        raise SystemExit(message)


def docker(words: list[str]) -> None:
    if words[0] == "build":
        require(Path(words[words.index("-f") + 1]).is_file(), "there is no such Dockerfile")
        (HERE / "built").write_text(words[words.index("-t") + 1])
    else:
        require(words[0] == "push" and words[1] == (HERE / "built").read_text(), f"docker {words}")
        with (HERE / "images").open("a") as images:
            images.write(f"{words[1]}\n")


def helm(words: list[str]) -> None:
    require(words[0] == "install", f"helm {words}")
    done = subprocess.run(
        [os.environ["HELM"], *words, "--dry-run=client"], capture_output=True, text=True
    )
    require(done.returncode == 0, done.stderr)
    manifest, _, notes = done.stdout.partition("MANIFEST:\n")[2].partition("NOTES:\n")
    keep(manifest)
    (HERE / "notes").write_text(notes)


def pods() -> set[str]:
    """Returns the names of the pods of the StatefulSets."""
    return {
        f"{each['metadata']['name']}-{index}"
        for each in documents()
        if each["kind"] == "StatefulSet"
        for index in range(each["spec"]["replicas"])
    }


def kubectl(words: list[str]) -> None:
    if words[0] == "--namespace":
        words = words[2:]
    kinds = {"statefulset": "StatefulSet", "job": "Job", "secret": "Secret"}
    if words[:2] == ["apply", "-f"]:
        keep(sys.stdin.read() if words[2] == "-" else Path(words[2]).read_text())
    elif words[0] == "kustomize":
        subprocess.run([os.environ["KUBECTL"], *words], check=True)
    elif words[:3] == ["create", "secret", "generic"]:
        keep(yaml.safe_dump(secret(words[3], words[4:])))
    elif words[0] in ("exec", "port-forward"):
        require(words[1] in pods(), f"there is no pod {words[1]}")
        for address in re.findall(r"[\w.-]+:7070", " ".join(words)):
            require(address.partition(".")[0] in pods(), f"no pod is called {address}")
    else:
        named = [word for word in words if word.partition("/")[0] in kinds]
        require(len(named) == 1, f"kubectl {words}")
        kind, _, name = named[0].partition("/")
        name = name or words[words.index(kind) + 1]
        require(name in names(kinds[kind]), f"there is no {kind} {name}")


def secret(name: str, words: list[str]) -> Document:
    """Returns the Secret that `kubectl create secret generic` makes."""
    data = {}
    for word in words:
        flag, _, value = word.partition("=")
        if flag == "--from-file":
            data[Path(value).name] = Path(value).read_bytes()
        else:
            require(flag == "--from-literal", word)
            key, _, text = value.partition("=")
            data[key] = text.encode()
    encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": encoded}


if __name__ == "__main__":
    {"docker": docker, "helm": helm, "kubectl": kubectl}[sys.argv[1]](sys.argv[2:])
