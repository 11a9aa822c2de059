"""Packages of other people, as pip would leave them."""

import shutil
import tomllib


def install(package, site):
    """Puts a package's modules and the metadata of its pyproject.toml into `site`, as pip would leave them."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    for module in package.glob("*.py"):
        shutil.copy(module, site)
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return site
