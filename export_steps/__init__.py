"""What `nbdev-export` does beside its own work: `[tool.nbdev]` in pyproject.toml names these steps. No part of the package."""
