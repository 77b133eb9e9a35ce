"""The bill of materials of an image, from files as an image has them."""

import io
import json
import tarfile
from datetime import UTC, datetime
from typing import Any

import pytest
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from deploy.sbom import bill_of_materials

STATUS = """Package: libstdc++6
Status: install ok installed
Section: {section}
Architecture: amd64
Source: gcc-12
Version: 12.2.0-14+deb12u1

Package: removed
Status: deinstall ok config-files
Section: libs
Architecture: amd64
Version: 1
"""
FILES = {
    "usr/lib/os-release": 'ID=debian\nVERSION_ID="12"\n',
    "usr/share/doc/gcc-12-base/copyright": "/usr/share/common-licenses/GPL-3,\n/usr/share/common-licenses/GFDL-1.2.\n",
    "usr/share/doc/busybox-static/copyright": "Format: DEP-5\n\nLicense: GPL-2\n\nLicense: bzip2-1.0.6\n text\n",
    "var/lib/dpkg/status.d/busybox-static": "Package: busybox-static\nStatus: install ok installed\nSection: shells\n"
    "Architecture: amd64\nVersion: 1:1.35.0-4\n",
    "opt/lib/antiphon-0.1.0.dist-info/METADATA": "Name: antiphon\nVersion: 1\nLicense-Expression: Apache-2.0 AND MIT\n",
    "opt/lib/antiphon-0.1.0.dist-info/sboms/antiphon.cdx.json": json.dumps(
        {"bomFormat": "CycloneDX", "specVersion": "1.6", "components": [{"type": "library", "name": "lit-html"}]}
    ),
    "bundle/manifest.json": json.dumps(
        {"name": "opus", "provenance": {"source": "OPUS", "licence": "CC BY 4.0", "attribution": "Authors"}}
    ),
    "usr/bin/other": "not read",
}


def exported(section: str = "libs") -> io.BytesIO:
    """Return these files as an archive of an image."""
    archived = io.BytesIO()
    with tarfile.open(fileobj=archived, mode="w") as archive:
        link = tarfile.TarInfo("usr/share/doc/libstdc++6")
        link.type, link.linkname = tarfile.SYMTYPE, "gcc-12-base"
        archive.addfile(link)
        for path, text in {**FILES, "var/lib/dpkg/status": STATUS.format(section=section)}.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    archived.seek(0)
    return archived


def written() -> str:
    bom = bill_of_materials("antiphon:0.1.0", exported(), datetime(2026, 1, 1, tzinfo=UTC))
    return JsonV1Dot6(bom).output_as_string()


def licences(component: dict[str, Any]) -> list[str]:
    rows = component.get("licenses", [])
    return [row.get("expression") or row["license"].get("id") or row["license"]["name"] for row in rows]


def test_bill_of_materials_lists_packages_licences_and_contents_of_packages() -> None:
    text = written()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    parts = {part["name"]: part for part in json.loads(text)["components"]}
    assert {name: licences(part) for name, part in parts.items()} == {
        "antiphon": ["Apache-2.0 AND MIT"],
        "busybox-static": ["bzip2-1.0.6", "GPL-2"],
        "debian": [],
        "libstdc++6": ["GFDL-1.2", "GPL-3"],
        "opus": [],
    }
    assert [part["name"] for part in parts["antiphon"]["components"]] == ["lit-html"]
    assert parts["libstdc++6"]["purl"].endswith("?arch=amd64&distro=debian-12&upstream=gcc-12")


def test_bill_of_materials_of_the_same_image_has_the_same_bytes() -> None:
    assert written() == written()


@pytest.mark.parametrize("section", ["non-free/libs", "contrib/libs", "non-free-firmware/kernel"])
def test_bill_of_materials_refuses_packages_outside_of_debian_main(section: str) -> None:
    with pytest.raises(ValueError, match=f"libstdc.*{section}"):
        bill_of_materials("antiphon:0.1.0", exported(section), datetime(2026, 1, 1, tzinfo=UTC))
