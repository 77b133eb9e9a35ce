"""Bill of materials of an image in CycloneDX JSON: the packages of Debian and Python, their licences, and models.

    podman export CONTAINER | python deploy/sbom.py IMAGE FILE

`make sbom` runs this. The same image and SOURCE_DATE_EPOCH give the same bytes.
"""

import email
import json
import os
import posixpath
import re
import sys
import tarfile
from collections.abc import Iterator
from datetime import UTC, datetime
from email.message import Message
from pathlib import Path
from typing import BinaryIO
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.spdx import is_supported_id
from packageurl import PackageURL

# A package that came without its archive's records has its entry in status.d, as in distroless images.
_READ = re.compile(
    r"usr/lib/os-release|usr/share/doc/.+|var/lib/dpkg/status(\.d/.+)?|.+\.dist-info/(METADATA|sboms/.+)|bundle/manifest\.json"
)
# Other names of licences in the metadata of Python packages, which older ones write as they like.
_SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "MIT License": "MIT",
}


class Files:
    """Files of an image that describe its parts: contents by path. links: targets of symbolic links, by path."""

    def __init__(self, exported: BinaryIO) -> None:
        self.contents: dict[str, str] = {}
        self.links: dict[str, str] = {}
        with tarfile.open(fileobj=exported, mode="r|*") as archive:
            for entry in archive:
                path = entry.name.removeprefix("./")
                if not _READ.fullmatch(path):
                    continue
                if entry.issym():
                    self.links[path] = posixpath.normpath(posixpath.join(posixpath.dirname(path), entry.linkname))
                elif (file := archive.extractfile(entry)) is not None:
                    self.contents[path] = file.read().decode(errors="replace")

    def matching(self, pattern: str) -> Iterator[tuple[str, str]]:
        """Return paths and contents, in order."""
        return ((path, text) for path, text in sorted(self.contents.items()) if re.fullmatch(pattern, path))

    def copyright(self, package: str) -> str:
        """Return the copyright file of a Debian package; its folder may be a link to that of another."""
        folder = f"usr/share/doc/{package}"
        path = f"{self.links.get(folder, folder)}/copyright"
        return self.contents.get(self.links.get(path, path), "")


def python_licence(metadata: Message) -> str | None:
    """Return the licence of an installed Python package as an SPDX expression, if its metadata has one."""
    if expression := metadata.get("License-Expression"):
        return expression
    field = (metadata.get("License") or "").partition("\n")[0]
    classifiers = re.findall(r"^Classifier: License :: OSI Approved :: (.+?)\r?$", str(metadata), re.MULTILINE)
    names = classifiers or ([field] if field else [])
    return " OR ".join(sorted(_SPDX.get(name, name) for name in names)) or None


def python_packages(files: Files) -> Iterator[Component]:
    """Return the installed packages. What a package lists of its own contents (PEP 770) is inside its component."""
    for path, text in files.matching(r".+\.dist-info/METADATA"):
        metadata = email.message_from_string(text)
        purl = PackageURL("pypi", name=metadata["Name"].lower(), version=metadata["Version"])
        licence = python_licence(metadata)
        inside = [
            part
            for _, listed in files.matching(re.escape(path.removesuffix("METADATA")) + r"sboms/.+\.json")
            for part in Bom.from_json(json.loads(listed)).components  # type: ignore[attr-defined]
        ]
        package = Component(
            name=metadata["Name"],
            version=metadata["Version"],
            description=metadata["Summary"],
            licenses=[LicenseFactory().make_from_string(licence)] if licence else [],
            purl=purl,
            bom_ref=str(purl),
            components=inside,
        )
        for part in package.get_all_nested_components():
            part.bom_ref.value = f"{purl}#{part.purl or part.name}"
        yield package


def debian_packages(files: Files, release: str) -> Iterator[Component]:
    """Return the installed packages. Raises ValueError for one that is not in Debian's main archive."""
    for _, text in files.matching(r"var/lib/dpkg/status(\.d/.+)?"):
        for paragraph in filter(None, text.strip().split("\n\n")):
            fields = email.message_from_string(paragraph)
            if not fields["Status"].endswith(" installed"):
                continue
            name, section = fields["Package"], fields["Section"]
            if "/" in section:
                raise ValueError(f"{name} is of section {section}, and only main has free software")
            source, _, source_version = (fields["Source"] or name).partition(" ")
            upstream = f"{source}@{source_version.strip('()')}" if source_version else source
            qualifiers = {"arch": fields["Architecture"], "distro": f"debian-{release}", "upstream": upstream}
            purl = PackageURL("deb", "debian", name, fields["Version"], qualifiers)
            yield Component(
                name=name,
                version=fields["Version"],
                licenses=[_licence(licence) for licence in debian_licences(files.copyright(name))],
                purl=purl,
                bom_ref=str(purl),
            )


def debian_licences(text: str) -> list[str]:
    """Return the names of licences in a copyright file; without the format DEP-5 those whose text Debian has."""
    is_dep5 = text.startswith("Format:")
    pattern = r"^License: *(\S.*?)\s*$" if is_dep5 else r"/usr/share/common-licenses/([A-Z][\w.-]*\w)"
    return sorted(set(re.findall(pattern, text, re.MULTILINE)))


def _licence(name: str) -> DisjunctiveLicense:
    return DisjunctiveLicense(id=name) if is_supported_id(name) else DisjunctiveLicense(name=name)


def bill_of_materials(image: str, exported: BinaryIO, date: datetime) -> Bom:
    """Return what an image contains; exported: its files as tar."""
    files = Files(exported)
    name, _, version = image.rpartition("/")[2].partition(":")
    release = re.search(r'^VERSION_ID="?([^"\n]+)', files.contents.get("usr/lib/os-release", ""), re.MULTILINE)
    number = release[1] if release else "unknown"
    components = [*debian_packages(files, number), *python_packages(files)]
    if release:
        system = ComponentType.OPERATING_SYSTEM
        components.append(Component(name="debian", version=number, type=system, bom_ref="debian"))
    for _, text in files.matching(r"bundle/manifest\.json"):
        bundle = json.loads(text)
        about = "{source}. {licence}\n{attribution}".format_map(bundle["provenance"])
        model = ComponentType.MACHINE_LEARNING_MODEL
        components.append(Component(name=bundle["name"], type=model, description=about, bom_ref="bundle"))
    subject = Component(name=name, version=version, type=ComponentType.CONTAINER, bom_ref=image)
    bom = Bom(
        components=components,
        metadata=BomMetaData(component=subject, timestamp=date),
        serial_number=uuid5(NAMESPACE_URL, " ".join([image, *sorted(str(part.bom_ref) for part in components)])),
    )
    bom.register_dependency(subject, components)
    return bom


def main(image: str, path: str) -> None:
    """Write the bill of materials of the image that is exported to standard input."""
    date = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), UTC)
    bom = bill_of_materials(image, sys.stdin.buffer, date)
    Path(path).write_text(JsonV1Dot6(bom).output_as_string(indent=2) + "\n", encoding="utf-8")
    unlicensed = [part.name for part in bom.components if not part.licenses and part.purl]
    print(f"{path}: {len(bom.components)} components; without a licence that programs can read: {unlicensed}")


if __name__ == "__main__":
    main(*sys.argv[1:])
