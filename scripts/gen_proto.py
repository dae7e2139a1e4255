"""Generates `pscore/pb` from `proto/`, or checks that it is up to date.

    python scripts/gen_proto.py            # write
    python scripts/gen_proto.py --check    # compare only; exit status 1 where something differs

The output depends on the `.proto` files and on the versions of grpcio-tools and mypy-protobuf
alone. mypy-protobuf writes the types of the services' stubs, so that mypy checks each field of a
request and of an answer. The generators write imports as if `proto/` were on the path; they are
rewritten to where the files are.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
TARGET = ROOT / "pscore" / "pb"
WELL_KNOWN = Path(protoc.__file__).parent / "_proto"
SERVICE = re.compile(r"^service ", re.M)
GRPC_TYPES = f"#!{sys.executable}\nfrom mypy_protobuf.main import grpc\ngrpc()\n"  # A plug-in.
INIT = '"""Generated from proto/ by scripts/gen_proto.py; never edited."""\n'


def generate(folder: Path) -> dict[Path, str]:
    """Returns the generated text by its path below `pscore/pb`; `folder` is for protoc's files."""
    sources = sorted(path.relative_to(PROTO).as_posix() for path in PROTO.glob("ps/v1/*.proto"))
    if not sources:
        sys.exit("gen_proto: there is no proto/ps/v1/*.proto")
    services = [name for name in sources if SERVICE.search((PROTO / name).read_text())]
    plugin = folder / "grpc_types"
    plugin.write_text(GRPC_TYPES)
    plugin.chmod(0o700)
    for kinds, names in ((("python", "pyi"), sources), (("grpc_python", "mypy_grpc"), services)):
        outputs = [f"--{kind}_out={folder}" for kind in kinds]
        flags = [f"-I{PROTO}", f"-I{WELL_KNOWN}", f"--plugin=protoc-gen-mypy_grpc={plugin}"]
        if protoc.main(["protoc", *flags, *outputs, *names]) != 0:
            sys.exit("gen_proto: protoc refused a file, see above")
    texts = {
        path.relative_to(folder): re.sub(
            r"^from ps\.v1 import", "from pscore.pb.ps.v1 import", path.read_text(), flags=re.M
        )
        for path in folder.rglob("*.py*")
    }
    packages = {parent for path in texts for parent in path.parents}
    return texts | {package / "__init__.py": INIT for package in packages}


def present() -> dict[Path, str]:
    """Returns what `pscore/pb` holds now, in the form of `generate`."""
    modules = [*TARGET.rglob("*.py"), *TARGET.rglob("*.pyi")]
    return {path.relative_to(TARGET): path.read_text() for path in modules}


def write(texts: dict[Path, str]) -> None:
    """Makes `pscore/pb` hold `texts` and nothing else."""
    for path in present().keys() - texts.keys():
        (TARGET / path).unlink()
    for path, text in texts.items():
        (TARGET / path).parent.mkdir(parents=True, exist_ok=True)
        (TARGET / path).write_text(text)


def main() -> None:
    """Reads the flags; writes or compares."""
    parser = argparse.ArgumentParser(description="Generates pscore/pb from proto/.")
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wanted = generate(Path(folder))
    found = present()
    differing = sorted(
        path.as_posix()
        for path in wanted.keys() | found.keys()
        if wanted.get(path) != found.get(path)
    )
    if not arguments.check:
        write(wanted)
    elif differing:
        sys.exit(f"gen_proto: not up to date, run make proto: {', '.join(differing)}")


if __name__ == "__main__":
    main()
