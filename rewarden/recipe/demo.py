"""Where the demo's recipe lies: beside the package in a checkout, inside it when installed from a wheel."""

from pathlib import Path

import rewarden
from rewarden.errors import ConfigError


def demo_recipe() -> Path:
    """The path of demo.yaml; ConfigError when the installation lacks it."""
    package = Path(rewarden.__file__).parent
    for folder in (package / "recipes", package.parent / "recipes"):
        if (folder / "demo.yaml").exists():
            return folder / "demo.yaml"
    raise ConfigError(
        f"demo.yaml is neither in {package / 'recipes'} nor in {package.parent / 'recipes'}; install rewarden anew"
    )
